// A fork-join pool. The kernels do not use OpenMP: torch brings a runtime of its own, and ThreadSanitizer cannot see into it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace oasis {

class ThreadPool {
 public:
  // `threads` counts the caller of `run`.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Calls body(i) for every i in [0, count), in the caller and in whichever helpers wake up in time.
  void run(int64_t count, const std::function<void(int64_t)>& body);

 private:
  void help();
  void work(const std::function<void(int64_t)>& body, int64_t count);

  std::vector<std::thread> helpers_;
  std::mutex one_caller_;
  std::mutex mutex_;
  std::condition_variable job_changed_;
  std::condition_variable helpers_done_;
  const std::function<void(int64_t)>* body_ = nullptr;  // null when there is no job
  int64_t count_ = 0;
  uint64_t job_ = 0;
  int busy_ = 0;
  bool closing_ = false;
  std::atomic<int64_t> next_{0};
};

// The pool of the forward pass, with as many threads as `set_threads` said last.
ThreadPool& thread_pool();
void set_threads(int threads);

}  // namespace oasis
