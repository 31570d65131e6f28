// Vectors of LANES elements and the few operations on them that a compiler's vector types lack.
//
// Included once by each path with its own LANES and instruction set. Everything is in an unnamed namespace: a function
// shared between paths could be the copy with instructions that the processor does not have.
#pragma once

#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

template <class Vector>
inline Vector load(const void* from) {
  Vector vector;
  __builtin_memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Vector>
inline void store(void* to, Vector vector) {
  __builtin_memcpy(to, &vector, sizeof vector);
}

// Between vectors of one size a cast keeps the bits.
inline Words bits(Floats x) { return (Words)x; }
inline Floats floats(Words x) { return (Floats)x; }

inline Words widen(const uint16_t* from) { return __builtin_convertvector(load<Halves>(from), Words); }
inline void narrow(uint16_t* to, Words x) { store(to, __builtin_convertvector(x, Halves)); }

inline Floats square_root(Floats x) {
#if LANES == 16
  return (Floats)_mm512_sqrt_ps((__m512)x);
#elif LANES == 8
  return (Floats)_mm256_sqrt_ps((__m256)x);
#else
  for (int lane = 0; lane < LANES; ++lane) x[lane] = __builtin_sqrtf(x[lane]);
  return x;
#endif
}

// fp16 by hand where there is no instruction. Exponents are moved by multiplying with powers of two, which is exact.
inline Floats from_fp16(const uint16_t* from) {
#if LANES == 16
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif LANES == 8
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  const Words x = widen(from);
  const Words magnitude = (x & 0x7FFFu) << 13;
  const Words scaled = bits(floats(magnitude) * 0x1p112f);
  const Words special = magnitude | 0x7F800000u;  // inf and NaN: exponent 31
  return floats((magnitude >= (0x1Fu << 23) ? special : scaled) | (x & 0x8000u) << 16);
#endif
}

inline void to_fp16(uint16_t* to, Floats x) {  // round to nearest, ties to even; a NaN is the quiet one
#if LANES == 16
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif LANES == 8
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  const Words magnitude = bits(x) & 0x7FFFFFFFu;
  const Words odd = magnitude >> 13 & 1u;
  const Words normal = (magnitude - (112u << 23) + 0xFFFu + odd) >> 13;
  // Below 2^-14: adding 0.5 leaves multiples of 2^-24 in the low bits, rounded by the addition itself.
  const Words denormal = bits(floats(magnitude) + 0.5f) - 0x3F000000u;
  Words half = magnitude < (113u << 23) ? denormal : normal;
  half = magnitude >= 0x477FF000u ? (Words{} + 0x7C00u) : half;  // 65520 and above
  half = magnitude > 0x7F800000u ? (Words{} + 0x7E00u) : half;
  narrow(to, half | (bits(x) >> 16 & 0x8000u));
#endif
}

inline Floats load_as_floats(const void* array, Kind kind, int64_t index) {
  if (kind == BF16) return floats(widen((const uint16_t*)array + index) << 16);
  if (kind == FP16) return from_fp16((const uint16_t*)array + index);
  return load<Floats>((const float*)array + index);
}

// Which operand's NaN an operation keeps is up to the compiler; what is stored must not be.
inline Floats canonical(Floats x) { return x == x ? x : floats(Words{} + 0x7FC00000u); }

}  // namespace
