#include "thread_pool.h"

#include <memory>
#include <utility>

#ifdef __linux__
#include <sched.h>
#endif

namespace oasis {

ThreadPool::ThreadPool(int threads) {
  for (int i = 1; i < threads; ++i) helpers_.emplace_back([this] { help(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  job_changed_.notify_all();
  for (auto& helper : helpers_) helper.join();
}

void ThreadPool::run(int64_t count, const std::function<void(int64_t)>& body) {
  if (count <= 1 || helpers_.empty()) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::lock_guard caller(one_caller_);
  {
    std::lock_guard lock(mutex_);
    body_ = &body;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    ++job_;
  }
  job_changed_.notify_all();
  work(body, count);
  std::unique_lock lock(mutex_);
  body_ = nullptr;  // who wakes up only now finds nothing to do
  helpers_done_.wait(lock, [this] { return busy_ == 0; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::help() {
  use_configured_cpus();
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    job_changed_.wait(lock, [&] { return closing_ || job_ != seen; });
    if (closing_) return;
    seen = job_;
    if (body_ == nullptr) continue;
    const auto& body = *body_;
    const int64_t count = count_;
    ++busy_;
    lock.unlock();
    work(body, count);
    lock.lock();
    if (--busy_ == 0) helpers_done_.notify_one();
  }
}

void ThreadPool::work(const std::function<void(int64_t)>& body, int64_t count) noexcept {
  try {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
  } catch (...) {
    next_.store(count, std::memory_order_relaxed);  // the others need not go on
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

namespace {

std::unique_ptr<ThreadPool>& pool() {
  static std::unique_ptr<ThreadPool> instance = std::make_unique<ThreadPool>(1);
  return instance;
}

std::vector<int>& configured_cpus() {
  static std::vector<int> cpus;
  return cpus;
}

}  // namespace

ThreadPool& thread_pool() { return *pool(); }

void configure_threads(int threads, std::vector<int> cpus) {
  pool().reset();
  configured_cpus() = std::move(cpus);
  pool() = std::make_unique<ThreadPool>(threads);
}

void use_configured_cpus() {
#ifdef __linux__
  if (configured_cpus().empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : configured_cpus())
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof(set), &set);  // where it is refused, the thread stays where it is
#endif
}

}  // namespace oasis
