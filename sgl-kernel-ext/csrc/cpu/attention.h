#pragma once

#include "args.h"

namespace oasis {

// Runs an attention call on the thread pool. What a query vector gets does not depend on the rest of the batch.
void attention(const AttentionArgs& args);

}  // namespace oasis
