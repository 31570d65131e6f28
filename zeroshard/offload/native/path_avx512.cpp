// The path with AVX-512.
#include "path.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LANES 16
#include "reduce.h"
#include "update.h"

const Path* avx512_path() {
  static const Path path = {update_range, accumulate_range, square_sum_block};
  return &path;
}
#else
const Path* avx512_path() { return nullptr; }
#endif
