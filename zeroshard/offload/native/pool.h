// Threads that wait for a job, do its parts, and wait for the next job.
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

// The threads of one process. A crew is never freed: after a fork the child has the object but not the threads, and its
// locks may be locked forever.
class Crew {
 public:
  Crew(int threads, const std::vector<int>& cores);

  bool run(const Job& job);  // false once closed
  void close();              // waits for a running job

  const pid_t process;

 private:
  void work(int core);
  void drain(const Job& job);

  std::mutex caller_;  // allows one job at a time
  std::mutex mutex_;   // protects everything below except the atomics
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  Job job_ = {};
  bool open_ = false;  // threads may join the job
  bool closing_ = false;
  int inside_ = 0;  // threads that have joined the job and not left it
  std::atomic<uint64_t> number_{0};  // the job's number
  std::atomic<int64_t> next_{0};     // the first part that no thread has taken
};

// The crew of this process. After a fork the child gets a new crew with its first call.
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
