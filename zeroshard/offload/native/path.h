// One SIMD path: its functions for a range of elements. All paths give the same bits.
#pragma once

#include "abi.h"

// Elements in a block of square_sum. The size is fixed, so that the order of additions depends only on the length.
constexpr int64_t BLOCK = 16384;

struct Path {
  void (*update)(const Segment&, const Rule&, float factor, uint64_t seed, int64_t offset, int64_t count);
  void (*accumulate)(float* total, const void* gradient, Kind, bool first, int64_t count);
  double (*square_sum)(const void* values, Kind, int64_t count);  // count <= BLOCK
};

// Null if the library was compiled without the instructions of the path.
const Path* portable_path();
const Path* avx2_path();
const Path* avx512_path();
