// Adding up gradients, and the sum of their squares.
#pragma once

#include "lanes.h"

namespace {

template <Kind kind>
void accumulate_vectors(float* total, const void* gradient, bool first, int64_t count) {
  for (int64_t index = 0; index < count; index += LANES) {
    Floats sum = load_as_floats<kind>(gradient, index);
    if (!first) sum = load<Floats>(total + index) + sum;
    store(total + index, canonical(sum));
  }
}

template <Kind kind>
void accumulate_kind(float* total, const void* gradient, bool first, int64_t count) {
  constexpr int64_t width = kind == FP32 ? 4 : 2;
  const int64_t whole = count - count % LANES;
  accumulate_vectors<kind>(total, gradient, first, whole);
  if (whole == count) return;
  alignas(64) float sums[LANES] = {};
  alignas(64) char values[width * LANES] = {};
  __builtin_memcpy(sums, total + whole, (count - whole) * 4);
  __builtin_memcpy(values, (const char*)gradient + whole * width, (count - whole) * width);
  accumulate_vectors<kind>(sums, values, first, LANES);
  __builtin_memcpy(total + whole, sums, (count - whole) * 4);
}

void accumulate_range(float* total, const void* gradient, Kind kind, bool first, int64_t count) {
  if (kind == BF16) return accumulate_kind<BF16>(total, gradient, first, count);
  if (kind == FP16) return accumulate_kind<FP16>(total, gradient, first, count);
  return accumulate_kind<FP32>(total, gradient, first, count);
}

constexpr int ROW = 16;  // the lanes of the widest path
typedef double Doubles __attribute__((vector_size(8 * LANES)));

template <Kind kind>
void add_squares(Doubles* sums, const void* values, int64_t count) {
  for (int64_t index = 0; index < count; index += ROW) {
    for (int part = 0; part < ROW / LANES; ++part) {
      const Doubles x = __builtin_convertvector(load_as_floats<kind>(values, index + part * LANES), Doubles);
      sums[part] += x * x;
    }
  }
}

// Every path uses the same 16 sums: element i is added to sum i % 16, and then the sums are added pairwise. So the
// order of additions does not depend on the path. Squares of fp32 values are exact in double.
template <Kind kind>
double square_sum_kind(const void* values, int64_t count) {
  constexpr int64_t width = kind == FP32 ? 4 : 2;
  Doubles sums[ROW / LANES] = {};
  const int64_t whole = count - count % ROW;
  add_squares<kind>(sums, values, whole);
  if (whole < count) {
    alignas(64) char copy[width * ROW] = {};
    __builtin_memcpy(copy, (const char*)values + whole * width, (count - whole) * width);
    add_squares<kind>(sums, copy, ROW);
  }
  double lanes[ROW];
  __builtin_memcpy(lanes, sums, sizeof lanes);
  for (int half = ROW / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

double square_sum_block(const void* values, Kind kind, int64_t count) {
  if (kind == BF16) return square_sum_kind<BF16>(values, count);
  if (kind == FP16) return square_sum_kind<FP16>(values, count);
  return square_sum_kind<FP32>(values, count);
}

}  // namespace
