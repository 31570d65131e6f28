// Threads that wait for a job, do its parts and wait again.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

// A job: `part(context, i)` for every i below `parts`, each once, in any order, on any thread.
struct Job {
  void (*part)(void* context, int64_t index);
  void* context;
  int64_t parts;
};

// One generation of threads. Never freed: after a fork the child has the object but not the threads, and its locks may
// be held by nobody.
class Crew {
 public:
  Crew(int threads, const std::vector<int>& cores);

  bool run(const Job& job);  // false once closed
  void close();              // waits for a running job

  const pid_t process;

 private:
  void work(int core);
  void drain(const Job& job);

  std::mutex caller_;  // one job at a time, whoever calls
  std::mutex mutex_;   // of everything below but the atomics
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  Job job_ = {};
  bool open_ = false;  // a job may be joined
  bool closing_ = false;
  int inside_ = 0;  // threads that joined the job and have not left it
  std::atomic<uint64_t> number_{0};  // of the job
  std::atomic<int64_t> next_{0};     // part that nobody has taken
};

// What the caller holds: the crew of this process, hired anew after a fork.
class Pool {
 public:
  Pool(int threads, std::vector<int> cores);
  bool run(const Job& job);
  void close();
  int threads() const { return count_; }

 private:
  Crew* crew();

  const int count_;
  const std::vector<int> cores_;
  std::atomic<Crew*> crew_;
};
