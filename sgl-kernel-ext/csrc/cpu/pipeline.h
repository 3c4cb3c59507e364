// The background pipeline: predict, select, transfer, one task per layer at a time, in native threads.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "args.h"
#include "tiers.h"

namespace oasis {

// How blocks are scored.
struct Selector {
  float tightness;
  int64_t sinks;  // blocks that are always selected, the first ones
  Smoothing smoothing;
};

// One layer of both tiers; the memory belongs to the caller and outlives the pipeline.
struct PipelineLayer {
  ChunkPool host;
  ResidentLayer resident;
  Summaries summaries;
  float* averages;  // [S, H, N], null where scores are not smoothed
};

// What the tasks of one decode step share: the rows that do not fit the budget.
struct PipelineStep {
  int32_t number;
  std::vector<int64_t> entries;  // their places in the batch
  std::vector<int64_t> rows;
  std::vector<int64_t> candidates;
  std::vector<int32_t> pages;  // [entries, pages_stride]
  int64_t pages_stride;
};

// Queries [n, count, heads, D] of a batch.
struct Queries {
  const void* data;
  DType dtype;
  int64_t entry_stride;
  int64_t stride;
  int64_t count;
  int64_t heads;
};

struct PipelineCounters {
  int64_t fetched = 0;
  int64_t deferred = 0;
  int64_t stalls = 0;
  int64_t stall_ns = 0;
  std::array<int64_t, 3> stage_ns = {};

  void operator+=(const PipelineCounters& other);
};

class Pipeline {
 public:
  Pipeline(int threads, const Selector& selector);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  void add_layer(const PipelineLayer& layer);
  // What `submit` and what `run` work for from now on.
  void begin_step(std::shared_ptr<const PipelineStep> step);
  void begin_urgent(std::shared_ptr<const PipelineStep> step);
  // The layer's previous task must have been waited for.
  void submit(int layer, const Queries& queries, float scale, int64_t cap);
  // Returns when the layer's task is through; does here whatever of it no thread has begun. Rethrows what the task threw.
  void wait(int layer);
  // Runs a task here, on all threads of the forward pass, without smoothing; returns the number of blocks loaded.
  int64_t run(int layer, const Queries& queries, float scale, int64_t cap);
  // Makes transfers take as long as over a link of that many bytes per second and thread; 0 for the memory's own rate.
  void throttle(double bytes_per_second);
  PipelineCounters counters();

 private:
  enum class State { kIdle, kQueued, kRunning, kDone };
  struct Task {
    State state = State::kIdle;
    std::shared_ptr<const PipelineStep> step;
    std::vector<float> queries;  // [entries, count, H * G, D]
    int64_t query_count = 0;
    int64_t query_heads = 0;
    float scale = 0;
    int64_t cap = 0;
    int64_t shares = 0;                  // one for every entry and KV head
    std::atomic<int64_t> next_share{0};  // the first that nobody has begun
    int workers = 0;
    std::exception_ptr error;
  };

  void serve();
  // Does the shares of a task that nobody has begun; the last to leave makes it kDone. `lock` is released meanwhile.
  void work_on(int layer, Task& task, std::unique_lock<std::mutex>& lock);
  // The part of one (entry, head), through every stage; `query` has the entry's.
  void execute_share(const PipelineLayer& layer, const PipelineStep& step, const Queries& query, float scale,
                     int64_t cap, bool smoothed, int64_t share, PipelineCounters& counters) const;

  const Selector selector_;
  std::vector<PipelineLayer> layers_;
  std::shared_ptr<const PipelineStep> step_;
  std::shared_ptr<const PipelineStep> urgent_;
  std::atomic<double> bytes_per_second_{0};
  std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable finished_;
  std::deque<int> queue_;
  std::deque<Task> tasks_;
  PipelineCounters counters_;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace oasis
