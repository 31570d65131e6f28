#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <cfenv>
#include <chrono>
#include <initializer_list>

namespace {

// The next job often comes at once, so a thread looks for it this long before it sleeps.
constexpr std::chrono::microseconds PATIENCE{30};

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Binds this thread to a core. If the core may not be used, the scheduler goes on choosing one.
void bind(int core) {
#if defined(__linux__)
  if (core < 0 || core >= CPU_SETSIZE) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
  (void)core;
#endif
}

// The program's own threads must get the signals: Ctrl-C must interrupt the thread that waits, not one of these.
void block_signals() {
  sigset_t blocked;
  sigfillset(&blocked);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&blocked, fault);
  pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
}

// While it lives, this thread computes with denormals. A program may have switched them off (torch.set_flush_denormal),
// and new threads inherit that.
class PlainFloats {
 public:
  PlainFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~PlainFloats() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
};

}  // namespace

Crew::Crew(int threads, const std::vector<int>& cores) : process(getpid()) {
  try {
    for (int index = 0; index < threads; ++index) {
      threads_.emplace_back(&Crew::work, this, index < int(cores.size()) ? cores[index] : -1);
    }
  } catch (...) {
    close();
    throw;
  }
}

void Crew::work(int core) {
  block_signals();
  bind(core);
  const PlainFloats plain;
  uint64_t seen = 0;
  for (;;) {
    const auto until = std::chrono::steady_clock::now() + PATIENCE;
    while (number_.load(std::memory_order_relaxed) == seen && std::chrono::steady_clock::now() < until) relax();
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [&] { return closing_ || number_.load(std::memory_order_relaxed) != seen; });
    if (closing_) return;
    seen = number_.load(std::memory_order_relaxed);
    if (!open_) continue;  // the other threads have done the whole job
    const Job job = job_;
    ++inside_;
    lock.unlock();
    drain(job);
    lock.lock();
    if (--inside_ == 0) done_.notify_one();
  }
}

void Crew::drain(const Job& job) {
  for (;;) {
    const int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
    if (index >= job.parts) return;
    job.part(job.context, index);
  }
}

bool Crew::run(const Job& job) {
  std::lock_guard<std::mutex> one(caller_);
  std::unique_lock<std::mutex> lock(mutex_);
  if (closing_) return false;
  if (job.parts <= 1) {  // waking a thread would take longer
    lock.unlock();
    const PlainFloats plain;
    for (int64_t index = 0; index < job.parts; ++index) job.part(job.context, index);
    return true;
  }
  job_ = job;
  next_.store(0, std::memory_order_relaxed);
  open_ = true;
  number_.fetch_add(1, std::memory_order_relaxed);
  lock.unlock();
  wake_.notify_all();
  lock.lock();
  // If all parts are taken and no thread is inside, all parts are done.
  done_.wait(lock, [&] { return inside_ == 0 && next_.load(std::memory_order_relaxed) >= job.parts; });
  open_ = false;
  return true;
}

void Crew::close() {
  std::lock_guard<std::mutex> one(caller_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

Pool::Pool(int threads, std::vector<int> cores)
    : count_(threads), cores_(std::move(cores)), crew_(new Crew(count_, cores_)) {}

Crew* Pool::crew() {
  Crew* current = crew_.load();
  while (current->process != getpid()) {
    Crew* hired = new Crew(count_, cores_);
    if (crew_.compare_exchange_strong(current, hired)) return hired;
    hired->close();  // another thread was faster
  }
  return current;
}

bool Pool::run(const Job& job) { return crew()->run(job); }

void Pool::close() {
  Crew* current = crew_.load();
  if (current->process == getpid()) current->close();
}
