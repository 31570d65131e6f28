// The path for any processor: vectors of four elements, which compilers turn into SSE2, NEON or plain loops.
#define LANES 4
#include "path.h"
#include "reduce.h"
#include "update.h"

const Path* portable_path() {
  static const Path path = {update_range, accumulate_range, square_sum_block};
  return &path;
}
