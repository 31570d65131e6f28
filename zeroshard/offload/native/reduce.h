// Accumulating gradients, and the sum of their squares.
#pragma once

#include "lanes.h"

namespace {

constexpr int LONGEST_ROW = 16;  // lanes of the widest path

void accumulate_vectors(float* total, const void* gradient, Kind kind, float factor, bool first, int64_t count) {
  for (int64_t index = 0; index < count; index += LANES) {
    Floats sum = load_as_floats(gradient, kind, index) * factor;
    if (!first) sum = load<Floats>(total + index) + sum;
    store(total + index, canonical(sum));
  }
}

void accumulate_range(float* total, const void* gradient, Kind kind, float factor, bool first, int64_t count) {
  const int64_t whole = count - count % LANES;
  accumulate_vectors(total, gradient, kind, factor, first, whole);
  if (whole == count) return;
  const int64_t width = kind == FP32 ? 4 : 2;
  alignas(64) float sums[LANES] = {};
  alignas(64) char values[4 * LANES] = {};
  __builtin_memcpy(sums, total + whole, (count - whole) * 4);
  __builtin_memcpy(values, (const char*)gradient + whole * width, (count - whole) * width);
  accumulate_vectors(sums, values, kind, factor, first, LANES);
  __builtin_memcpy(total + whole, sums, (count - whole) * 4);
}

typedef double Doubles __attribute__((vector_size(8 * LANES)));

// Every path adds into the same 16 sums, element i into sum i % 16, and these pairwise: the order is a property of the
// block, not of the vectors. Squares of fp32 values are exact in double.
double square_sum_block(const void* values, Kind kind, int64_t count) {
  constexpr int ROWS = LONGEST_ROW / LANES;
  Doubles sums[ROWS] = {};
  const int64_t whole = count - count % LONGEST_ROW;
  for (int64_t index = 0; index < whole; index += LONGEST_ROW) {
    for (int row = 0; row < ROWS; ++row) {
      const Doubles x = __builtin_convertvector(load_as_floats(values, kind, index + row * LANES), Doubles);
      sums[row] += x * x;
    }
  }
  if (whole < count) {
    const int64_t width = kind == FP32 ? 4 : 2;
    alignas(64) char copy[4 * LONGEST_ROW] = {};
    __builtin_memcpy(copy, (const char*)values + whole * width, (count - whole) * width);
    for (int row = 0; row < ROWS; ++row) {
      const Doubles x = __builtin_convertvector(load_as_floats(copy, kind, row * LANES), Doubles);
      sums[row] += x * x;
    }
  }
  double lanes[LONGEST_ROW];
  __builtin_memcpy(lanes, sums, sizeof lanes);
  for (int half = LONGEST_ROW / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

}  // namespace
