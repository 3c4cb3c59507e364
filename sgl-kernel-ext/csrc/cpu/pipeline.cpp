#include "pipeline.h"

#include <algorithm>
#include <stdexcept>

#include "kernels.h"
#include "thread_pool.h"

#ifdef __linux__
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace oasis {
namespace {

using Clock = std::chrono::steady_clock;

int64_t ns_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

// The forward pass goes first where cores are short: it is waited for, this work has a whole step's time.
void yield_to_the_forward_pass() {
#ifdef __linux__
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 10);
#endif
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

int Pipeline::add_layer(const PipelineLayer& layer) {
  std::lock_guard lock(mutex_);
  layers_.push_back(layer);
  tasks_.emplace_back();
  return static_cast<int>(layers_.size()) - 1;
}

void Pipeline::begin_step(std::shared_ptr<const PipelineStep> step) { step_ = std::move(step); }

void Pipeline::submit(int layer, const Queries& queries, float scale, int64_t cap) {
  Task& task = tasks_[layer];
  if (task.state != State::kIdle) throw std::logic_error("the layer's last lookahead task was not waited for");
  const int64_t dim = layers_[layer].host.head_dim, width = queries.heads * dim;
  task.step = step_;
  task.query_heads = queries.heads;
  task.scale = scale;
  task.cap = cap;
  task.queries.resize(step_->entries.size() * width);
  for (size_t i = 0; i < step_->entries.size(); ++i)
    for (int64_t head = 0; head < queries.heads; ++head)
      kernels().read_vector(queries.dtype, task.queries.data() + i * width + head * dim, queries.data,
                            step_->entries[i] * queries.stride + head * dim, dim);
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
  ++counters_.stalls;
  const auto start = Clock::now();
  if (task.state == State::kQueued) {
    queue_.erase(std::find(queue_.begin(), queue_.end(), layer));
    task.state = State::kRunning;
    lock.unlock();
    PipelineCounters counters;
    execute(layer, task, counters);
    lock.lock();
    add(counters);
    task.state = State::kIdle;
  } else {
    finished_.wait(lock, [&] { return task.state == State::kIdle; });
  }
  counters_.stall_ns += ns_since(start);
}

int64_t Pipeline::run(int layer, const Queries& queries, float scale, int64_t cap) {
  const PipelineStep& step = *step_;
  const int64_t heads = layers_[layer].host.kv_heads;
  PipelineCounters total;
  std::mutex mutex;
  thread_pool().run(step.entries.size() * heads, [&](int64_t share) {
    PipelineCounters counters;
    Queries query = queries;
    query.data = static_cast<const char*>(queries.data) +
                 step.entries[share / heads] * queries.stride * element_bytes(queries.dtype);
    execute_share(layers_[layer], step, query, scale, cap, share, counters);
    std::lock_guard lock(mutex);
    total.fetched += counters.fetched;
    total.deferred += counters.deferred;
    for (int stage = 0; stage < 3; ++stage) total.stage_ns[stage] += counters.stage_ns[stage];
  });
  std::lock_guard lock(mutex_);
  add(total);
  return total.fetched;
}

PipelineCounters Pipeline::counters() {
  std::lock_guard lock(mutex_);
  return counters_;
}

void Pipeline::serve() {
  yield_to_the_forward_pass();
  std::unique_lock lock(mutex_);
  for (;;) {
    queued_.wait(lock, [&] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const int layer = queue_.front();
    queue_.pop_front();
    Task& task = tasks_[layer];
    task.state = State::kRunning;
    lock.unlock();
    PipelineCounters counters;
    execute(layer, task, counters);
    lock.lock();
    add(counters);
    task.state = State::kIdle;
    finished_.notify_all();
  }
}

void Pipeline::execute(int layer, Task& task, PipelineCounters& counters) const {
  const PipelineLayer& place = layers_[layer];
  const int64_t heads = place.host.kv_heads, width = task.query_heads * place.host.head_dim;
  const int64_t shares = task.step->entries.size() * heads;
  for (int64_t share = 0; share < shares; ++share) {
    const Queries query{task.queries.data() + share / heads * width, DType::kFloat32, width, task.query_heads};
    execute_share(place, *task.step, query, task.scale, task.cap, share, counters);
  }
  task.step.reset();
}

void Pipeline::execute_share(const PipelineLayer& layer, const PipelineStep& step, const Queries& query, float scale,
                             int64_t cap, int64_t share, PipelineCounters& counters) const {
  const int64_t entry = share / layer.host.kv_heads, head = share % layer.host.kv_heads;
  const int64_t row = step.rows[entry], candidates = step.candidates[entry];
  const int64_t record = summary_bytes(layer.summaries.format, layer.host.head_dim);
  thread_local std::vector<float> scores;
  thread_local std::vector<Admission> admissions;
  scores.resize(candidates);

  auto start = Clock::now();
  const uint8_t* records =
      layer.summaries.records + (row * layer.host.kv_heads + head) * layer.summaries.blocks * record;
  score_row(query.data, query.dtype, query.stride, 1, query.heads, layer.host, head, records, layer.summaries.format,
            candidates, scale, selector_.tightness, selector_.sinks, scores.data());
  counters.stage_ns[0] += ns_since(start);

  start = Clock::now();
  counters.deferred +=
      select_row(scores.data(), candidates, layer.resident, row, head, step.number, cap, admissions);
  counters.stage_ns[1] += ns_since(start);

  start = Clock::now();
  for (const Admission& admission : admissions)
    admit(layer.resident, layer.host, row, head, step.pages[entry * step.pages_stride + admission.block], admission,
          step.number);
  counters.fetched += admissions.size();
  counters.stage_ns[2] += ns_since(start);
}

void Pipeline::add(const PipelineCounters& counters) {
  counters_.fetched += counters.fetched;
  counters_.deferred += counters.deferred;
  for (int stage = 0; stage < 3; ++stage) counters_.stage_ns[stage] += counters.stage_ns[stage];
}

}  // namespace oasis
