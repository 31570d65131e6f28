// The structures that cross the C border. kernel.py packs Segment, rules.py packs Rule, byte for byte.
#pragma once

#include <stdint.h>

// How the elements of one array are stored.
enum Kind : int32_t {
  ABSENT = 0,
  FP32 = 1,
  BF16 = 2,
  FP16 = 3,
  REMAINDER = 4,  // the low half of a split master: int16, added to the bits of the bf16 parameter
  SIGNED_CODES = 5,    // 8-bit moments: codes.h says what a code is
  POSITIVE_CODES = 6,  // of a moment without negative elements
};

constexpr bool is_code(Kind kind) { return kind == SIGNED_CODES || kind == POSITIVE_CODES; }

// Elements of an 8-bit moment that share a scale. Every parameter and every shard begins at a multiple of this
// (ALIGNMENT in config/layout.py), so a tile has the same elements in every world size.
constexpr int TILE = 64;

// A contiguous range of one parameter. Addresses and kinds stay the same from step to step.
struct Segment {
  void* gradient;
  void* master;
  void* parameter;  // may be the gradient's address: every element is read before it is written
  void* moments[2];
  uint8_t* scales[2];  // of moments that are codes: one for each tile
  int64_t length;
  int64_t start;  // index of the first element within the parameter; with codes a multiple of TILE
  uint64_t key;   // identifies the parameter, for stochastic rounding
  Kind gradient_kind;
  Kind master_kind;
  Kind parameter_kind;
  Kind moment_kinds[2];
  int32_t padding;
};

enum Algorithm : int32_t { ADAM = 0, SGD = 1 };

enum Flag : int32_t {
  MAXIMIZE = 1,
  DECAY_GRADIENT = 2,  // weight decay is added to the gradient (Adam, SGD), not subtracted from the parameter (AdamW)
  LERP_FROM_END = 4,   // the formula of torch.lerp for weights of 0.5 and more
  NESTEROV = 8,
  FIRST = 16,  // the momentum buffer has no value yet
};

// Hyper-parameters of one segment in one step. Every constant was computed in double and rounded to fp32 once.
struct Rule {
  Algorithm algorithm;
  int32_t flags;
  int64_t step;
  float shrink;         // 1 - lr * weight_decay (AdamW), 1 otherwise
  float decay;          // weight_decay, with DECAY_GRADIENT
  float first_weight;   // Adam: 1 - beta1. SGD: 1 - dampening
  float retention;      // the factor of the old moment. Adam: beta2. SGD: momentum
  float second_weight;  // Adam: 1 - beta2
  float correction;     // Adam: sqrt(1 - beta2 ** step)
  float epsilon;        // Adam
  float step_size;      // Adam: -lr / (1 - beta1 ** step). SGD: -lr
};

static_assert(sizeof(Segment) == 104, "kernel.py packs 104 bytes");
static_assert(sizeof(Rule) == 48, "rules.py packs 48 bytes");
