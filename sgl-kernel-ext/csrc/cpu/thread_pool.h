// A fork-join pool. The kernels do not use OpenMP: torch brings a runtime of its own, and ThreadSanitizer cannot see into it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
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

  // Calls body(i) for every i in [0, count), in the caller and in whichever helpers wake up in time. Rethrows the first
  // exception of any of them, when all have stopped.
  void run(int64_t count, const std::function<void(int64_t)>& body);

 private:
  void help();
  void work(const std::function<void(int64_t)>& body, int64_t count) noexcept;

  std::vector<std::thread> helpers_;
  std::mutex one_caller_;
  std::mutex mutex_;
  std::condition_variable job_changed_;
  std::condition_variable helpers_done_;
  const std::function<void(int64_t)>* body_ = nullptr;  // null when there is no job
  int64_t count_ = 0;
  uint64_t job_ = 0;
  int busy_ = 0;
  std::exception_ptr error_;
  bool closing_ = false;
  std::atomic<int64_t> next_{0};
};

// The pool of the forward pass.
ThreadPool& thread_pool();
// How many threads it has, the caller counted, and on which CPUs the threads of this library may run. A thread inherits
// the CPUs of the one that starts it, and that one may have been bound to a single core.
void configure_threads(int threads, std::vector<int> cpus);
// Called by a thread of this library when it starts.
void use_configured_cpus();

}  // namespace oasis
