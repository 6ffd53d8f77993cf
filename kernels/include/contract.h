// The parameter struct of every kernel. dsuf/cuda/contract.py has the same fields in the same order; a test compares.
//
// Common to all: `rows` is what the launch covers, `*live` on the device how many of them count. A row at or past
// `*live` is padding: never read, never routed, written as zero (or not at all, where its place is not its own).
// Matrices are row-major without gaps unless a stride says otherwise. `bf16` arrays are uint16_t. "May be null" is said
// where it may.
#pragma once
#include <stdint.h>

namespace dsuf {

struct QuantizeRows {
  const uint16_t* x;        // [rows, width], 16-byte aligned rows
  uint8_t* codes;           // row r at codes + place * codes_stride
  uint8_t* scales;          // likewise
  uint16_t* meaning;        // [rows, width] what the codes mean; may be null
  const int64_t* place;     // [rows] where a row goes, negative: nowhere; null: row r to r
  const int32_t* live;
  int64_t codes_stride;     // bytes
  int64_t scales_stride;    // bytes
  int32_t rows;
  int32_t width;            // multiple of the quantiser's group
};

struct NormQuantize {
  const uint16_t* x;        // [rows, width]
  const uint16_t* weight;   // [width]
  uint16_t* y;              // [rows, width]
  uint8_t* codes;           // [rows, width] FP8 of y; may be null
  uint8_t* scales;          // [rows, width / 32]; null with codes
  const int32_t* live;
  int32_t rows;
};

struct ProjectStreams {
  const uint16_t* streams;  // [rows, streams * dim]
  const float* fn;          // [outputs, streams * dim]
  float* partial;           // [rows, splits, outputs + 1]: products, then the sum of squares
  const int32_t* live;
  int32_t rows;
};

struct MixStreams {
  const float* partial;     // [rows, splits, outputs + 1]
  const float* base;        // [outputs]
  const float* scale;       // [3]
  float* pre;               // [rows, streams]
  float* post;              // [rows, streams]
  float* comb;              // [rows, from, to]
  const int32_t* live;
  int32_t rows;
};

struct CollapseNorm {
  const uint16_t* streams;  // [rows, streams, dim]
  const float* pre;         // [rows, streams]
  const uint16_t* weight;   // [dim]
  uint16_t* y;              // [rows, dim]
  uint8_t* codes;           // [rows, dim] FP8 of y; may be null
  uint8_t* scales;          // [rows, dim / 32]; null with codes
  const int32_t* live;
  int32_t rows;
};

struct ExpandStreams {
  const uint16_t* branch;   // [rows, dim]
  const uint16_t* streams;  // [rows, streams, dim]
  const float* post;        // [rows, streams]
  const float* comb;        // [rows, from, to]
  uint16_t* out;            // [rows, streams, dim]; may be `streams`
  const int32_t* live;
  int32_t rows;
};

struct RotateRows {
  uint16_t* x;                // [rows, heads, width], in place
  const int64_t* positions;   // [rows]
  const float* frequencies;   // [rope width / 2] radians a position
  const int32_t* live;
  int32_t rows;
  int32_t heads;
  int32_t width;
  int32_t inverse;            // 1: turn back
};

struct ProjectFp8 {
  const uint8_t* codes;     // [rows, k] E4M3
  const uint8_t* scales;    // [rows, k / 32] E8M0
  const uint8_t* weight;    // [n, k] E4M3
  const uint8_t* weight_scale;  // [ceil(n / 32), k / 32] E8M0
  uint16_t* out;            // [rows, n]
  const int32_t* live;
  int32_t rows;
  int32_t n;
};

struct ProjectBf16 {
  const uint16_t* x;        // [rows, k]
  const uint16_t* weight;   // [n, k]
  float* out;               // [rows, n] float32; may be null
  uint16_t* rounded;        // [rows, n] BF16; may be null
  const int32_t* live;
  int32_t rows;
  int32_t n;
};

struct ProjectGroups {
  const uint16_t* x;        // [rows, groups, k]
  const uint8_t* weight;    // [groups, rank, k] E4M3
  const uint8_t* weight_scale;  // [groups * rank / 32, k / 32] E8M0
  uint16_t* out;            // [rows, groups, rank]
  const int32_t* live;
  int32_t rows;
};

struct RouteExperts {
  const float* logits;      // [rows, experts]
  const float* bias;        // [experts]
  int32_t* chosen;          // [rows, picks] ascending; -1 in padding rows
  float* weights;           // [rows, picks]
  const int32_t* live;
  int32_t rows;
  int32_t experts;
  int32_t picks;
};

struct GroupExperts {
  const int32_t* chosen;    // [rows, picks]; negative: not routed
  int32_t* used;            // [1] distinct experts
  int32_t* expert;          // [experts] the distinct experts, ascending; -1 after `used`
  int32_t* first;           // [experts + 1] where each one's pairs begin in `order`
  int32_t* order;           // [rows * picks] pairs by expert, then by number; -1 after the last
  int32_t rows;
  int32_t picks;
  int32_t experts;
};

struct ExpertsUp {
  const uint8_t* codes;     // [rows, dim] E4M3
  const uint8_t* scales;    // [rows, dim / 32]
  const uint8_t* w1;        // [experts, inter, dim / 2] E2M1
  const uint8_t* w1_scale;  // [experts, inter, dim / 32] E8M0
  const uint8_t* w3;        // as w1
  const uint8_t* w3_scale;
  const float* weights;     // [rows, picks] routing weights
  const int32_t* used;      // from GroupExperts, likewise the next three
  const int32_t* expert;
  const int32_t* first;
  const int32_t* order;
  uint16_t* inner;          // [rows * picks, inter]; pairs that are not routed stay as they are
  int32_t slots;            // experts that the launch covers
  int32_t picks;
};

struct ExpertsDown {
  const uint8_t* codes;     // [rows * picks, inter] E4M3
  const uint8_t* scales;    // [rows * picks, inter / 32]
  const uint8_t* w2;        // [experts, dim, inter / 2] E2M1
  const uint8_t* w2_scale;  // [experts, dim, inter / 32]
  const int32_t* used;
  const int32_t* expert;
  const int32_t* first;
  const int32_t* order;
  uint16_t* out;            // [rows * picks, dim]
  int32_t slots;
};

struct CombineExperts {
  const uint16_t* routed;   // [rows, picks, dim]
  const uint16_t* shared;   // [rows, dim]
  uint16_t* out;            // [rows, dim]
  const int32_t* live;
  int32_t rows;
  int32_t picks;
};

struct Swiglu {
  const uint16_t* hidden;   // [rows, 2 * inter]
  uint16_t* inner;          // [rows, inter]
  const int32_t* live;
  int32_t rows;
};

struct AttendSparse {
  const uint16_t* q;        // [rows, heads, head_dim]
  const uint8_t* window;    // packed FP8 rows: head_dim codes, head_dim / 32 scales
  const uint8_t* entries;   // packed FP4 rows: head_dim / 2 codes, head_dim / 16 scales; null without compression
  const int32_t* slots;     // [rows, window_slots + entry_slots] row numbers, -1: none
  const float* sink;        // [heads]
  uint16_t* out;            // [rows, heads, head_dim]
  const int32_t* live;
  int32_t rows;
  int32_t heads;
  int32_t window_slots;
  int32_t entry_slots;
};

struct ScaleHeads {
  uint16_t* weights;        // [rows, index heads], in place
  const int32_t* live;
  int32_t rows;
};

struct ScoreIndex {
  const uint16_t* q;        // [rows, index heads, index dim], what the quantised queries mean
  const uint16_t* weights;  // [rows, index heads]
  const uint8_t* keys;      // packed FP4 rows: index dim / 2 codes, index dim / 32 scales
  const int32_t* reachable; // [rows] entries that a row may see
  float* scores;            // [rows, entries]; -inf past what a row may see
  const int32_t* live;
  int32_t rows;
  int32_t entries;
};

struct SelectRows {
  const float* scores;      // [rows, entries]; every score is a BF16 value
  const int32_t* reachable; // [rows]
  int32_t* selected;        // [rows, count] ascending, then -1
  const int32_t* live;
  int32_t rows;
  int32_t entries;
  int32_t count;
};

struct CompressRows {
  const float* kv;          // [rows, head_dim]
  const float* gate;        // [rows, head_dim]
  float* halves;            // [slots, 2, head_dim] first halves that wait: kv, then gate
  const int64_t* keep;      // [rows] the slot that keeps this row, negative: none
  const int64_t* partner;   // [rows] first half of the group that this row completes: r >= 0: row r of the launch;
                            // -1: it completes none; -2 - s: slot s
  uint16_t* pooled;         // [rows, head_dim]; zeros where no group is completed
  const int32_t* live;
  int32_t rows;
};

struct GatherEngram {
  const int64_t* history;   // [rows, shifts] Engram ids, column s is s positions back
  const int64_t* multipliers;  // [shifts]
  const int64_t* primes;    // [columns]
  const int64_t* offsets;   // [columns]
  const uint8_t* table;     // [table rows, engram dim] E4M3; device or pinned host memory
  const uint8_t* table_scale;  // [table rows, engram dim / 32] E8M0
  uint8_t* codes;           // [rows, columns * engram dim] FP8 of the gathered rows
  uint8_t* scales;          // [rows, columns * engram dim / 32]
  const int32_t* live;
  int32_t rows;
};

struct GateEngram {
  const uint16_t* streams;  // [rows, streams, dim]
  const uint16_t* projected;  // [rows, streams + 1, dim]: a key a stream, then the value
  const uint16_t* q_weight;  // [streams, dim]
  const uint16_t* k_weight;  // [streams, dim]
  uint16_t* out;            // [rows, streams, dim]; may be `streams`
  const int32_t* live;
  int32_t rows;
};

struct PickTokens {
  const float* logits;      // [rows, vocabulary]
  int32_t* picked;          // [rows]; -1 in padding rows
  float* best;              // [rows] the picked logit
  const int32_t* live;
  int32_t rows;
  int32_t vocabulary;
};

struct AnnouncePartial {
  const int64_t* arrived;   // [ranks] the address of every rank's arrival words, the own ones among them
  int32_t* epoch;           // [1] reductions that this rank has announced
  int32_t rank;
  int32_t ranks;            // at most 8
};

struct ReducePeers {
  const int64_t* partials;  // [ranks] the address of every rank's part [rows, width] BF16
  const int32_t* arrived;   // [ranks] what each rank has announced here
  const int32_t* epoch;     // [1]
  uint16_t* out;            // [rows, width]; not a part
  int32_t* missing;         // [1] a rank that did not arrive, plus one; left alone if all did
  const int32_t* live;
  int32_t rows;
  int32_t width;
  int32_t ranks;
  int32_t patience_us;
};

}  // namespace dsuf
