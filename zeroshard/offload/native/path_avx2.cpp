// The path with AVX2 and F16C, for x86 processors of the last ten years.
#include "path.h"

#if defined(__AVX2__) && defined(__F16C__)
#define LANES 8
#include "reduce.h"
#include "update.h"

const Path* avx2_path() {
  static const Path path = {update_range, accumulate_range, square_sum_block};
  return &path;
}
#else
const Path* avx2_path() { return nullptr; }
#endif
