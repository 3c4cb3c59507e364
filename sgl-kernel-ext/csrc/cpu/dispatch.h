// What kernels.h cannot say: it is compiled for every instruction set, and no template instance may be.
#pragma once

#include <vector>

#include "kernels.h"

namespace oasis {

// The tables that this machine runs, the fastest first.
std::vector<const Kernels*> runnable_kernels();

}  // namespace oasis
