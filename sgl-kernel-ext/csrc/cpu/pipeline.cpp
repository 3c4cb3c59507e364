#include "pipeline.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "kernels.h"
#include "thread_pool.h"

#ifdef __linux__
#include <sched.h>
#endif

namespace oasis {
namespace {

using Clock = std::chrono::steady_clock;

int64_t ns_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

// Takes only what the forward pass leaves of the cores: it is waited for, this work has a whole step's time. A thread that
// is merely nicer keeps a core for a while when it has one, and a parallel region waits for its slowest thread.
void yield_to_the_forward_pass() {
#ifdef __linux__
  const sched_param none{};
  sched_setscheduler(0, SCHED_IDLE, &none);  // of this thread; where it is refused, the thread competes
#endif
}

// Returns `seconds` after `start`, on the average of many calls of a thread: a sleep takes longer than a block takes on the
// links that this stands for, so what one sleep took too long the next ones do not take. Beyond a millisecond the thread was
// kept from its core, and a link would have had nothing to do.
void sleep_through(Clock::time_point start, double seconds) {
  thread_local Clock::duration overslept{};
  const std::chrono::duration<double> asked(seconds);
  const auto end = start + std::chrono::duration_cast<Clock::duration>(asked) - overslept;
  std::this_thread::sleep_until(end);
  overslept = std::min<Clock::duration>(Clock::now() - end, std::chrono::milliseconds(1));
}

}  // namespace

Pipeline::Pipeline(int threads, const Selector& selector) : selector_(selector) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { serve(); });
}

Pipeline::~Pipeline() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  queued_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Pipeline::add_layer(const PipelineLayer& layer) {
  std::lock_guard lock(mutex_);
  layers_.push_back(layer);
  tasks_.emplace_back();
}

void Pipeline::begin_step(std::shared_ptr<const PipelineStep> step) { step_ = std::move(step); }

void Pipeline::begin_urgent(std::shared_ptr<const PipelineStep> step) { urgent_ = std::move(step); }

void Pipeline::throttle(double bytes_per_second) { bytes_per_second_ = bytes_per_second; }

void Pipeline::submit(int layer, const Queries& queries, float scale, int64_t cap) {
  Task& task = tasks_[layer];
  {
    std::lock_guard lock(mutex_);
    if (task.state != State::kIdle) throw std::logic_error("the layer's last lookahead task was not waited for");
  }
  const int64_t dim = layers_[layer].host.head_dim;
  task.step = step_;
  task.query_count = queries.count;
  task.query_heads = queries.heads;
  task.scale = scale;
  task.cap = cap;
  task.shares = step_->entries.size() * layers_[layer].host.kv_heads;
  task.next_share.store(0, std::memory_order_relaxed);
  task.queries.resize(step_->entries.size() * queries.count * queries.heads * dim);
  float* to = task.queries.data();
  for (const int64_t entry : step_->entries)
    for (int64_t q = 0; q < queries.count; ++q)
      for (int64_t head = 0; head < queries.heads; ++head, to += dim)
        kernels().read_vector(queries.dtype, to, queries.data,
                              entry * queries.entry_stride + q * queries.stride + head * dim, dim);
  {
    std::lock_guard lock(mutex_);
    task.state = State::kQueued;
    queue_.push_back(layer);
  }
  queued_.notify_one();
}

void Pipeline::wait(int layer) {
  Task& task = tasks_[layer];
  std::unique_lock lock(mutex_);
  if (task.state == State::kIdle) return;
  if (task.state != State::kDone) {
    ++counters_.stalls;
    const auto start = Clock::now();
    if (task.state == State::kQueued) queue_.erase(std::find(queue_.begin(), queue_.end(), layer));
    work_on(layer, task, lock);
    finished_.wait(lock, [&] { return task.state == State::kDone; });
    counters_.stall_ns += ns_since(start);
  }
  task.state = State::kIdle;
  if (task.error) std::rethrow_exception(std::exchange(task.error, nullptr));
}

int64_t Pipeline::run(int layer, const Queries& queries, float scale, int64_t cap) {
  const PipelineStep& step = *urgent_;
  const int64_t heads = layers_[layer].host.kv_heads;
  PipelineCounters total;
  std::mutex mutex;
  thread_pool().run(step.entries.size() * heads, [&](int64_t share) {
    PipelineCounters counters;
    Queries query = queries;
    query.data = static_cast<const char*>(queries.data) +
                 step.entries[share / heads] * queries.entry_stride * element_bytes(queries.dtype);
    execute_share(layers_[layer], step, query, scale, cap, false, share, counters);
    std::lock_guard lock(mutex);
    total += counters;
  });
  std::lock_guard lock(mutex_);
  counters_ += total;
  return total.fetched;
}

PipelineCounters Pipeline::counters() {
  std::lock_guard lock(mutex_);
  return counters_;
}

void Pipeline::serve() {
  use_configured_cpus();
  yield_to_the_forward_pass();
  std::unique_lock lock(mutex_);
  for (;;) {
    queued_.wait(lock, [&] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const int layer = queue_.front();
    queue_.pop_front();
    work_on(layer, tasks_[layer], lock);
  }
}

void Pipeline::work_on(int layer, Task& task, std::unique_lock<std::mutex>& lock) {
  const PipelineLayer& place = layers_[layer];
  const int64_t heads = place.host.kv_heads, width = task.query_heads * place.host.head_dim;
  const int64_t entry_width = task.query_count * width;
  task.state = State::kRunning;
  ++task.workers;
  lock.unlock();
  PipelineCounters counters;
  std::exception_ptr error;
  try {
    for (int64_t share; (share = task.next_share.fetch_add(1, std::memory_order_relaxed)) < task.shares;) {
      const Queries query{task.queries.data() + share / heads * entry_width, DType::kFloat32, entry_width, width,
                          task.query_count, task.query_heads};
      execute_share(place, *task.step, query, task.scale, task.cap, true, share, counters);
    }
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  counters_ += counters;
  if (error) task.error = error;
  if (--task.workers == 0) {
    task.state = State::kDone;
    task.step.reset();
    finished_.notify_all();
  }
}

void Pipeline::execute_share(const PipelineLayer& layer, const PipelineStep& step, const Queries& query, float scale,
                             int64_t cap, bool smoothed, int64_t share, PipelineCounters& counters) const {
  const int64_t entry = share / layer.host.kv_heads, head = share % layer.host.kv_heads;
  const int64_t row = step.rows[entry], candidates = step.candidates[entry];
  const int64_t record = summary_bytes(layer.summaries.format, layer.host.head_dim);
  thread_local std::vector<float> scores;
  thread_local std::vector<Admission> admissions;
  scores.resize(candidates);

  auto start = Clock::now();
  const uint8_t* records =
      layer.summaries.records + (row * layer.host.kv_heads + head) * layer.summaries.blocks * record;
  score_row(query.data, query.dtype, query.stride, query.count, query.heads, layer.host, head, records,
            layer.summaries.format, layer.summaries.scaling, candidates, scale, selector_.tightness, scores.data());
  if (smoothed && layer.averages != nullptr)
    smooth(selector_.smoothing, candidates, layer.averages + layer.resident.inverse_offset(row, head), scores.data());
  std::fill_n(scores.data(), std::min(selector_.sinks, candidates), std::numeric_limits<float>::infinity());
  counters.stage_ns[0] += ns_since(start);

  start = Clock::now();
  counters.deferred +=
      select_row(scores.data(), candidates, layer.resident, row, head, step.number, cap, admissions);
  counters.stage_ns[1] += ns_since(start);

  start = Clock::now();
  for (const Admission& admission : admissions)
    admit(layer.resident, layer.host, row, head, step.pages[entry * step.pages_stride + admission.block], admission,
          step.number);
  if (const double rate = bytes_per_second_.load(std::memory_order_relaxed); rate > 0)
    sleep_through(start, static_cast<double>(admissions.size()) * 2 * layer.host.half_chunk_bytes() / rate);
  counters.fetched += admissions.size();
  counters.stage_ns[2] += ns_since(start);
}

void PipelineCounters::operator+=(const PipelineCounters& other) {
  fetched += other.fetched;
  deferred += other.deferred;
  for (size_t stage = 0; stage < stage_ns.size(); ++stage) stage_ns[stage] += other.stage_ns[stage];
}

}  // namespace oasis
