// A thread block on a CPU: its threads are fibers that run until they meet a barrier.
//
// Each warp runs ahead of the others, in even blocks the first warp first and in odd ones the last, until the whole block
// must meet: where a barrier is missing, what others were to write before is not there. A barrier that not all threads
// reach ends the process.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

namespace oasis {

constexpr int kFiberStack = 128 * 1024, kWarpSize = 32;

struct Index { unsigned x; };

struct Barrier {
  int arrived = 0;
  int64_t generation = 0;
};

struct PendingCopy {
  void* to;
  unsigned char bytes[16];
  int size, group;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kFiberStack]};
  bool alive;
  int copy_group;
  std::vector<PendingCopy> copies;
};

struct Warp {
  Barrier barrier;
  int alive, exchanges;
  uint64_t words[2][kWarpSize][6];  // of the collective before the last and of the last
};

// A thread block as it runs.
struct Machine {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  std::vector<unsigned char> shared;
  std::function<void()> kernel;
  int alive = 0, current = 0;
  bool progress = false, backwards = false;
  int64_t bytes_read = 0;  // by copy16_async, copy4_async and load_once, of all launches
};

inline Machine machine;

inline Index threadIdx, blockIdx, blockDim, gridDim;

inline void meet(Barrier& barrier, const int& expected) {
  const int64_t generation = barrier.generation;
  ++barrier.arrived;
  machine.progress = true;
  while (barrier.generation == generation && barrier.arrived < expected)
    swapcontext(&machine.fibers[machine.current].context, &machine.scheduler);
  if (barrier.generation == generation) {
    barrier.arrived = 0;
    ++barrier.generation;
    machine.progress = true;
  }
}

inline void run_fiber() {
  machine.kernel();
  machine.fibers[machine.current].alive = false;
  machine.progress = true;
  --machine.alive;
  --machine.warps[machine.current / kWarpSize].alive;
}

// Lets a warp run ahead of the others as far as it can; whether it did anything.
inline bool run_warp(int warp) {
  bool any = false;
  do {
    machine.progress = false;
    for (int i = warp * kWarpSize; i < (warp + 1) * kWarpSize; ++i) {
      if (!machine.fibers[i].alive) continue;
      machine.current = i;
      threadIdx = {static_cast<unsigned>(i)};
      swapcontext(&machine.scheduler, &machine.fibers[i].context);
    }
    any |= machine.progress;
  } while (machine.progress);
  return any;
}

inline void run_block(int threads) {
  machine.fibers.resize(threads);
  machine.warps.assign(threads / kWarpSize, Warp{{}, kWarpSize, 0, {}});
  machine.barrier = {};
  machine.alive = threads;
  std::fill(machine.shared.begin(), machine.shared.end(), 0xff);
  for (Fiber& fiber : machine.fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kFiberStack;
    fiber.context.uc_link = &machine.scheduler;
    fiber.alive = true;
    fiber.copy_group = 0;
    fiber.copies.clear();
    makecontext(&fiber.context, run_fiber, 0);
  }
  const int warps = threads / kWarpSize;
  for (int turn = 0, idle = 0; machine.alive > 0; ++turn) {
    const int warp = machine.backwards ? warps - 1 - turn % warps : turn % warps;
    idle = run_warp(warp) ? 0 : idle + 1;
    if (idle > warps) {
      std::fputs("cuda_on_cpu: threads wait at a barrier that others do not reach\n", stderr);
      std::abort();
    }
  }
}

}  // namespace oasis
