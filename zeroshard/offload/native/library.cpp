// The C interface that zeroshard/offload/kernel.py calls. Here the work is divided into parts for the threads.
#include <algorithm>
#include <vector>

#include "path.h"
#include "pool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Parts of a segment start at multiples of this many elements, so that no vector crosses a cache line and no tile is cut.
constexpr int64_t ALIGNMENT = TILE;

// Elements that a thread takes at a time. Long parts are read faster, because prefetching starts again with every part.
// But every thread should have several parts: then the others can do the work of a thread whose core is busy.
constexpr int64_t LONGEST = 65536, SHORTEST = 8192, PARTS_OF_A_THREAD = 8;

// More threads than any machine can use. The number of parts must not overflow, either.
constexpr int32_t MOST_THREADS = 4096;

enum Status : int32_t { OK = 0, CLOSED = 1, NO_THREADS = 2, INVALID = 3 };
enum PathNumber : int32_t { PORTABLE = 0, AVX2 = 1, AVX512 = 2 };

// A handle is never freed (some hundred bytes): a thread may still call after the pool was closed at interpreter exit.
struct Handle {
  const Path* path;
  Pool pool;
};

bool processor_has(PathNumber number) {
  if (number == PORTABLE) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned a, b, c = 0, d;
  const bool fp16 = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  if (number == AVX2) return fp16 && __builtin_cpu_supports("avx2");
  return fp16 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

const Path* path_of(int32_t number) {
  if (number < PORTABLE || number > AVX512) return nullptr;
  const Path* path = number == PORTABLE ? portable_path() : number == AVX2 ? avx2_path() : avx512_path();
  return processor_has(PathNumber(number)) ? path : nullptr;
}

// Calls a function that may throw: no exception may cross the C border.
template <class Function>
Status guarded(int64_t count, Function function) {
  if (count < 0) return INVALID;
  try {
    return function();
  } catch (...) {  // a thread did not start, or memory ran out
    return NO_THREADS;
  }
}

template <class Work>
Status run(Handle* handle, int64_t parts, Work& work) {
  const Job job = {[](void* context, int64_t index) { (*static_cast<Work*>(context))(index); }, &work, parts};
  return handle->pool.run(job) ? OK : CLOSED;
}

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

int64_t part_length(const Handle* handle, int64_t total) {
  const int64_t fair = total / (int64_t(handle->pool.threads()) * PARTS_OF_A_THREAD);
  return round_up(std::min(std::max(fair, SHORTEST), LONGEST), ALIGNMENT);
}

}  // namespace

EXPORT int32_t zeroshard_has_path(int32_t number) { return path_of(number) != nullptr; }

EXPORT Handle* zeroshard_open(int32_t path, int32_t threads, const int32_t* cores, int32_t core_count) {
  if (path_of(path) == nullptr || threads < 1 || threads > MOST_THREADS || core_count < 0) return nullptr;
  try {
    return new Handle{path_of(path), Pool(threads, std::vector<int>(cores, cores + core_count))};
  } catch (...) {
    return nullptr;
  }
}

EXPORT void zeroshard_close(Handle* handle) { handle->pool.close(); }

EXPORT int32_t zeroshard_update(Handle* handle, const Segment* segments, const Rule* rules, int64_t count,
                                float factor, uint64_t seed) {
  return guarded(count, [=] {
    // The segments are laid end to end, each padded to the alignment, and divided as if they were one.
    std::vector<int64_t> ends(count);
    int64_t total = 0;
    for (int64_t index = 0; index < count; ++index) ends[index] = total += round_up(segments[index].length, ALIGNMENT);
    const int64_t step = part_length(handle, total);
    auto work = [&](int64_t part) {
      const int64_t end = std::min(total, (part + 1) * step);
      int64_t position = part * step;
      int64_t index = std::upper_bound(ends.begin(), ends.end(), position) - ends.begin();
      for (; position < end; ++index) {
        const Segment& segment = segments[index];
        const int64_t offset = position - (index == 0 ? 0 : ends[index - 1]);
        const int64_t next = std::min(end, ends[index]);
        const int64_t length = std::min(next - position, segment.length - offset);
        if (length > 0) handle->path->update(segment, rules[index], factor, seed, offset, length);
        position = next;
      }
    };
    return run(handle, (total + step - 1) / step, work);
  });
}

EXPORT int32_t zeroshard_accumulate(Handle* handle, float* total, const void* gradient, Kind kind, int32_t first,
                                    int64_t count) {
  return guarded(count, [=] {
    const int64_t step = part_length(handle, count);
    auto work = [&](int64_t part) {
      const int64_t offset = part * step;
      const char* from = static_cast<const char*>(gradient) + offset * (kind == FP32 ? 4 : 2);
      handle->path->accumulate(total + offset, from, kind, first != 0, std::min(step, count - offset));
    };
    return run(handle, (count + step - 1) / step, work);
  });
}

EXPORT int32_t zeroshard_square_sum(Handle* handle, const void* values, Kind kind, int64_t count, double* result) {
  return guarded(count, [=] {
    std::vector<double> sums((count + BLOCK - 1) / BLOCK);
    auto work = [&](int64_t block) {
      const int64_t offset = block * BLOCK;
      const char* from = static_cast<const char*>(values) + offset * (kind == FP32 ? 4 : 2);
      sums[block] = handle->path->square_sum(from, kind, std::min(BLOCK, count - offset));
    };
    const Status status = run(handle, int64_t(sums.size()), work);
    *result = 0;
    for (double sum : sums) *result += sum;  // always in the same order
    return status;
  });
}
