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
  uint16_t* meaning;        // [rows, dim] what the codes mean, in the order of fragment.cuh; may be null, null with codes
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

struct ExpandCollapse {
  const uint16_t* branch;   // [rows, dim]
  const uint16_t* streams;  // [rows, streams, dim]
  const float* post;        // [rows, streams]
  const float* comb;        // [rows, from, to]
  uint16_t* out;            // [rows, streams, dim]; may be `streams`
  const float* pre;         // [rows, streams] the weights of the collapse of `out`
  const uint16_t* weight;   // [dim]
  uint16_t* y;              // [rows, dim]
  uint8_t* codes;           // [rows, dim] FP8 of y; may be null
  uint8_t* scales;          // [rows, dim / 32]; null with codes
  uint16_t* meaning;        // as in CollapseNorm
  const int32_t* live;
  int32_t rows;
};

struct SumExpand {
  const int64_t* partials;  // [ranks] the address of every rank's part of the branch [rows, dim] BF16
  const int32_t* arrived;   // as in ReducePeers, and so on
  const int32_t* epoch;
  int32_t* missing;
  const uint16_t* streams;  // as in ExpandStreams, and so on
  const float* post;
  const float* comb;
  uint16_t* out;
  const int32_t* live;
  int32_t rows;
  int32_t ranks;
  int32_t patience_us;
};

struct SumExpandCollapse {
  const int64_t* partials;  // as in SumExpand, and so on
  const int32_t* arrived;
  const int32_t* epoch;
  int32_t* missing;
  const uint16_t* streams;  // as in ExpandCollapse, and so on
  const float* post;
  const float* comb;
  uint16_t* out;
  const float* pre;
  const uint16_t* weight;
  uint16_t* y;
  uint8_t* codes;
  uint8_t* scales;
  uint16_t* meaning;
  const int32_t* live;
  int32_t rows;
  int32_t ranks;
  int32_t patience_us;
};

struct PlaceAngles {
  const int64_t* positions;  // [rows]
  const int64_t* group_positions;  // [rows]
  const float* window;      // [rope width / 2] radians a position
  const float* compressed;  // likewise
  float* angles;            // [3, rows, rope width / 2, 2] cosine and sine, by kind
  const int32_t* live;
  int32_t rows;
};

struct StoreRows {
  const uint16_t* x;        // [rows, k]
  const uint16_t* weight;   // [k]
  uint16_t* normed;         // [rows, k]; may be null
  uint16_t* turned;         // [rows, k]; may be null
  uint8_t* packed;          // codes, then scales: row r at packed + place * row_bytes
  const int64_t* place;     // [rows] where a row goes, negative: nowhere; null: row r to r
  const float* angles;      // [rows, rope width] one kind of PlaceAngles
  const int32_t* live;
  int64_t row_bytes;
  int32_t rows;
};

struct NormLatents {
  const uint16_t* latent;   // [rows, q_lora]
  const uint16_t* weight;   // [q_lora]
  uint16_t* query;          // [rows, q_lora] normed latents
  uint8_t* codes;           // [rows, q_lora] their FP8 form
  uint8_t* scales;          // [rows, q_lora / 32]
  const uint16_t* key;      // [rows, head_dim]; this and the rest as in StoreRows
  const uint16_t* key_weight;  // [head_dim]
  uint16_t* turned;         // [rows, head_dim]; may be null
  uint8_t* packed;
  const int64_t* place;     // [rows]; may be null
  const float* angles;      // [rows, rope width]
  const int32_t* live;
  int64_t row_bytes;
  int32_t rows;
};

struct ProjectFp8 {
  const uint8_t* codes;     // [rows, k] E4M3
  const uint8_t* scales;    // [rows, k / 32] E8M0
  const uint8_t* weight;    // [n + second_n, k] E4M3
  const uint8_t* weight_scale;  // [ceil((n + second_n) / 32), k / 32] E8M0
  uint16_t* out;            // [rows, n]
  uint16_t* second;         // [rows, second_n] the outputs behind those, of the same matrix; may be null, 0 outputs
  const int32_t* live;
  int32_t rows;
  int32_t n;
  int32_t second_n;
};

struct AnnounceFp8 {
  const uint8_t* codes;     // as in ProjectFp8, and so on
  const uint8_t* scales;
  const uint8_t* weight;
  const uint8_t* weight_scale;
  uint16_t* out;            // this rank's part
  uint16_t* second;
  const int64_t* arrived;   // as in AnnouncePartial, and so on
  int32_t* epoch;
  int32_t* counter;         // [1] blocks that are done; zero before and behind
  const int32_t* live;
  int32_t rows;
  int32_t n;
  int32_t second_n;
  int32_t rank;
  int32_t ranks;
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
  uint16_t* out;            // [rows, groups, rank]; may be null
  uint8_t* codes;           // [rows, groups * rank] FP8 of it
  uint8_t* scales;          // [rows, groups * rank / 32]
  const int32_t* live;
  int32_t rows;
};

struct RouteExperts {
  const float* logits;      // [rows, experts]
  const float* bias;        // [experts]
  int32_t* chosen;          // [rows, picks] ascending; -1 in padding rows
  float* weights;           // [rows, picks]
  int32_t* used;            // as in GroupExperts, likewise the next three; null: choices are not grouped
  int32_t* expert;
  int32_t* first;
  int32_t* order;
  int32_t* arrived;         // [1] rows that are done; zero before and after
  const int32_t* live;
  int32_t rows;
  int32_t experts;
  int32_t picks;
};

struct ScoreInput {
  const uint16_t* x;        // [rows, dim]
  const uint16_t* weight;   // [experts, dim]
  const float* bias;        // [experts]
  float* scores;            // [rows, experts]
  float* biased;            // [rows, experts] scores plus bias
  const int32_t* live;
  int32_t rows;
  int32_t experts;
};

struct ChooseFew {
  const float* scores;      // [rows, experts] from ScoreInput, likewise the next
  const float* biased;
  int32_t* chosen;          // [rows, picks]
  float* weights;           // [rows, picks]
  int32_t* used;            // as in GroupExperts, likewise the next three
  int32_t* expert;
  int32_t* first;
  int32_t* order;
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

struct ArrangeCodes {
  uint8_t* codes;           // [16 * count]
  int32_t count;
};

struct ExpertsUp {
  const uint16_t* x;        // [rows, dim] in the order of fragment.cuh
  const uint8_t* w1;        // [experts, inter, dim / 2] E2M1, as ArrangeCodes leaves it
  const uint8_t* w1_scale;  // [experts, inter, dim / 32] E8M0
  const uint8_t* w3;        // as w1
  const uint8_t* w3_scale;
  const float* weights;     // [rows, picks] routing weights
  const int32_t* used;      // from GroupExperts, likewise the next three
  const int32_t* expert;
  const int32_t* first;
  const int32_t* order;
  uint16_t* inner;          // [rows * picks, inter]; pairs that are not routed stay as they are
  const uint8_t* shared;    // [2 * inter, dim] E4M3: w1 and w3 of the shared expert
  const uint8_t* shared_scale;  // [2 * inter / 32, dim / 32] E8M0
  uint16_t* shared_inner;   // [rows, inter]; padding stays as it is
  const int32_t* live;
  int32_t rows;
  int32_t slots;            // experts that the launch covers
  int32_t picks;
};

struct ExpertsDown {
  const uint16_t* inner;    // [rows * picks, inter]
  const uint8_t* w2;        // [experts, dim, inter / 2] E2M1
  const uint8_t* w2_scale;  // [experts, dim, inter / 32]
  const int32_t* used;
  const int32_t* expert;
  const int32_t* first;
  const int32_t* order;
  uint16_t* out;            // [rows * picks, dim]
  const uint8_t* shared;    // [dim, inter] E4M3: w2 of the shared expert
  const uint8_t* shared_scale;  // [dim / 32, inter / 32] E8M0
  const uint16_t* shared_inner;  // [rows, inter]
  uint16_t* shared_out;     // [rows, dim]; padding stays as it is
  const int32_t* live;
  int32_t rows;
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

struct AnnounceExperts {
  const uint16_t* routed;   // as in CombineExperts, and so on
  const uint16_t* shared;
  uint16_t* out;            // this rank's part
  const int64_t* arrived;   // as in AnnouncePartial, and so on
  int32_t* epoch;
  int32_t* counter;         // [1] blocks that are done; zero before and behind
  const int32_t* live;
  int32_t rows;
  int32_t picks;
  int32_t rank;
  int32_t ranks;
};

struct AttendSparse {
  const uint16_t* q;        // [rows, heads, head_dim]
  const uint8_t* window;    // packed FP8 rows: head_dim codes, head_dim / 32 scales
  const uint8_t* fresh;     // packed FP8 rows of this launch, kept apart from `window`; may be null
  const uint8_t* entries;   // packed FP4 rows: head_dim / 2 codes, head_dim / 16 scales; null without compression
  const int32_t* slots;     // [rows, window_slots] row r >= 0 of `window`, -2 - r: row r of `fresh`, -1: none
  const int32_t* selected;  // [rows, entry_slots] row numbers of `entries`, -1: none; null without
  const float* sink;        // [heads]
  const float* angles;      // [rows, rope width]
  uint16_t* out;            // [rows, heads, head_dim]
  const int32_t* live;
  int32_t rows;
  int32_t heads;
  int32_t window_slots;
  int32_t entry_slots;
  int32_t early;            // 1: what is read but for q was written before the launch ahead of this one
};

struct IndexQueries {
  const uint16_t* q;        // [rows, index heads, index dim]
  uint16_t* meaning;        // [rows, index heads, index dim] what the quantised queries mean
  uint16_t* weights;        // [rows, index heads], in place
  const float* angles;      // [rows, rope width]
  const int32_t* live;
  int32_t rows;
};

struct ScoreIndex {
  const uint16_t* q;        // [rows, index heads, index dim], what the quantised queries mean
  const uint16_t* weights;  // [rows, index heads]
  const uint8_t* keys;      // packed FP4 rows: index dim / 2 codes, index dim / 32 scales
  const int32_t* row_slot;  // [rows]
  const int32_t* table;     // [turns, table_pages] physical page of each page of a turn
  const int32_t* blocks;    // [rows, block_count] the only blocks of entries to score, ascending; may be null
  const int32_t* reachable; // [rows] entries that a row may see, those inside its blocks if there are any
  uint16_t* scores;         // [rows, entries] BF16; nothing is written past what a row may see
  const int32_t* live;
  int32_t rows;
  int32_t entries;          // multiple of 8
  int32_t table_pages;
  int32_t page_rows;        // rows of a page, a power of two
  int32_t block_count;
  int32_t block_size;
};

struct SelectRows {
  const uint16_t* scores;   // [rows, entries] BF16
  const int32_t* row_slot;  // [rows]
  const int32_t* table;     // [turns, table_pages]; null: the selection stays in entries of the turn
  const int32_t* blocks;    // [rows, block_count] as scored; may be null
  const int32_t* reachable; // [rows] as scored
  int32_t* selected;        // [rows, count] rows of the entry store, in ascending order of a turn's entries, then -1
  const int32_t* live;
  int32_t rows;
  int32_t entries;          // multiple of 8
  int32_t count;
  int32_t table_pages;
  int32_t page_rows;        // a power of two
  int32_t block_count;
  int32_t block_size;
};

struct MarkBlocks {
  const uint16_t* scores;   // [rows, entries] BF16
  const int32_t* reachable; // [rows]
  int32_t* blocks;          // [rows, block_count] ascending, then -1
  int32_t* inside;          // [rows] reachable entries inside those blocks
  const int32_t* live;
  int32_t rows;
  int32_t entries;          // multiple of 8
  int32_t block_count;
  int32_t block_size;
};

struct CompressRows {
  const float* kv;          // [rows, head_dim]
  const float* gate;        // [rows, head_dim]
  float* halves;            // [slots, 2, head_dim] first halves that wait: kv, then gate
  const int64_t* keep;      // [rows] the slot that keeps this row, -1: none; -2 - r: the slot that this row reads is
                            // then given to row r
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
  uint16_t* out;            // [first + rows, width]; not a part
  int32_t* missing;         // [1] a rank that did not arrive, plus one; left alone if all did
  const int32_t* live;
  int32_t first;            // rows ahead of this are left alone
  int32_t rows;
  int32_t width;
  int32_t ranks;
  int32_t patience_us;
};

struct GatherPeers {
  const int64_t* partials;  // [ranks] the address of every rank's part [rows, width] float32
  const int32_t* arrived;   // [ranks]
  const int32_t* epoch;     // [1]
  float* out;               // [rows, ranks, width]; not a part
  int32_t* missing;         // [1] as in ReducePeers
  const int32_t* live;
  int32_t rows;
  int32_t width;
  int32_t ranks;
  int32_t patience_us;
};

struct GatherRows {
  const int64_t* tables;    // [count, 8] the address of every rank's array
  const int64_t* row_bytes; // [count]
  const int32_t* arrived;   // [ranks]
  const int32_t* epoch;     // [1]
  int32_t* missing;         // [1] as in ReducePeers
  int32_t rows;             // of each rank's share
  int32_t count;
  int32_t rank;
  int32_t ranks;
  int32_t patience_us;
};

struct PlaceRows {
  const int32_t* row_slot;  // [rows] whose row it is; rows of a turn are neighbours, one position after the other
  const int32_t* row_position;  // [rows]
  const int32_t* row_id;    // [rows] token, negative: none (a picture)
  const int32_t* ids;       // [turns, ring] tokens by position, of positions before the launch's
  const int32_t* table;     // [turns, table_pages], negative: no page
  const int32_t* floors;    // [turns, 4] where windows begin: encoder, boundary, decoder, draft
  const int32_t* engram_ids;  // [vocabulary] Engram id of each token
  int64_t* positions;       // [rows]
  int64_t* group_positions;  // [rows] first position of the row's group of two
  int64_t* ring_place;      // [rows] row of a store of rings, turn by turn; -1: a later row of the launch takes it
  int64_t* entry_place;     // [2, rows] row of the entry store at ratio 1 and at ratio 2; -1: none
  int32_t* reachable;       // [2, rows] entries that the row may see at ratio 1 and at ratio 2
  int64_t* keep;            // [rows] for CompressRows, likewise the next
  int64_t* partner;         // [rows]
  int64_t* history;         // [rows, shifts] Engram ids, column s is s positions back
  int32_t* windows;         // [3, rows, window] for AttendSparse: encoder, boundary, decoder
  const int32_t* live;
  int32_t rows;
  int32_t turns;
  int32_t ring;             // rows of a ring
  int32_t table_pages;
  int32_t page_tokens;      // a power of two
  int32_t halves;           // first halves kept of a turn, at least two
  int32_t pad_id;           // Engram id that fills a history
  int32_t fresh;            // 1: window rows of the launch are read from AttendSparse.fresh, 0: from their ring
};

struct KeepIds {
  const int32_t* row_slot;  // [rows]
  const int32_t* row_position;  // [rows]
  const int32_t* row_id;    // [rows]
  int32_t* ids;             // [turns, ring]
  const int32_t* live;
  int32_t rows;
  int32_t turns;
  int32_t ring;
};

struct EmbedRows {
  const uint16_t* embedding;  // [vocabulary, dim]
  const int32_t* row_id;    // [rows]; a row without a token is zero
  uint16_t* streams;        // [rows, streams, dim]
  float* pre;               // [rows, streams] 1, 0, 0 ...
  const int32_t* live;
  int32_t rows;
};

struct MeanStreams {
  const uint16_t* streams;  // [rows, streams, dim]
  uint16_t* taps;           // [rows, taps, dim], of which one is written
  const int32_t* live;
  int32_t rows;
  int32_t tap;
};

struct GatherTurns {
  const int32_t* wanted;    // [batch] slots, negative: none
  const int32_t* done;      // [turns] not 0: the turn has ended
  int32_t* turn;            // [batch] the slots that go on, in their order; then -1
  int32_t* live_turns;      // [1] how many
  int32_t* live_rows;       // [1] draft rows of those
  int32_t batch;            // at most 1024
  int32_t turns;
};

struct PlaceDrafts {
  const int32_t* turn;      // [batch] from GatherTurns
  const int32_t* length;    // [turns] positions in the cache
  const int32_t* anchor;    // [turns] the token after them
  const int32_t* floors;    // [turns, 4]
  int32_t* row_slot;        // [batch, block]
  int32_t* row_position;    // [batch, block]
  int32_t* row_id;          // [batch, block] the anchor, then noise
  int64_t* positions;       // [batch, block]
  int32_t* windows;         // [batch, block, window + block] for AttendSparse, block rows in `fresh`
  const int32_t* live;      // turns
  int32_t batch;
  int32_t turns;
  int32_t ring;
  int32_t noise_id;
};

struct AddMarkov {
  const uint16_t* embed;    // [vocabulary, rank]
  const uint16_t* head;     // [vocabulary, rank]
  const int32_t* anchors;   // [batch, block] block rows' ids
  const int32_t* drafts;    // [batch, block] chosen so far
  float* logits;            // [batch, block, vocabulary]; those of `place` get their bias
  const int32_t* live;      // turns
  int32_t batch;
  int32_t place;
  int32_t vocabulary;
};

struct RateDrafts {
  const uint16_t* streams;  // [batch, block, streams, dim] of the last stage
  const float* pre;         // [batch, block, streams]
  const uint16_t* embed;    // [vocabulary, rank]
  const float* weight;      // [dim + rank]
  const int32_t* anchors;   // [batch, block]
  const int32_t* drafts;    // [batch, block]
  float* confidence;        // [batch, block] before any sigmoid
  const int32_t* live;      // turns
  int32_t batch;
};

struct PlaceVerify {
  const int32_t* turn;      // [batch]
  const int32_t* length;    // [turns]
  const int32_t* anchor;    // [turns]
  const int32_t* drafts;    // [batch, block]; may be null without drafts
  const float* confidence;  // [batch, block]; null: no draft is left out
  int32_t* verified;        // [batch] drafts that are looked at
  int32_t* first;           // [batch] first row of a turn
  int32_t* row_slot;        // [rows]
  int32_t* row_position;    // [rows]
  int32_t* row_id;          // [rows] the anchor, then drafts
  int32_t* live_rows;       // [1]
  const int32_t* live;      // turns
  int32_t batch;            // at most 1024
  int32_t turns;
  int32_t rows;             // at least batch * (limit + 1)
  int32_t limit;            // drafts at most, at most the block
  float threshold;          // of the running confidence
};

struct SampleRows {
  const float* logits;      // [rows, vocabulary]
  const int32_t* row_slot;  // [rows]
  const int32_t* row_position;  // [rows] the token of the position after it is drawn
  const double* temperature;  // [turns] 0: greedy
  const double* top_p;      // [turns]
  const int64_t* seed;      // [turns]
  int32_t* picked;          // [rows] the draw; the largest logit's where greedy or nothing is drawn; -1 in padding
  float* peak;              // [rows] largest logit
  float* least;             // [rows] smallest logit of the nucleus
  int32_t* last;            // [rows] the highest id of that logit that is in the nucleus
  int64_t* mass;            // [rows] sum of 2^44 * e^((logit - peak) / temperature) over the nucleus
  const int32_t* live;      // how many of the launch's rows count
  int32_t rows;             // rows first, first + step ... of the arrays
  int32_t turns;
  int32_t vocabulary;
  int32_t first;
  int32_t step;
  int32_t purpose;          // of the draw: 0 token, 1 draft; negative: none
};

struct JudgeDrafts {
  const float* logits;      // [rows, vocabulary] of the verified rows, with what SampleRows found of them
  const int32_t* picked;
  const float* peak;
  const float* least;
  const int32_t* last;
  const int64_t* mass;
  const float* draft_logits;  // [batch, block, vocabulary] likewise; null without drafts
  const float* draft_peak;
  const float* draft_least;
  const int32_t* draft_last;
  const int64_t* draft_mass;
  const int32_t* drafts;    // [batch, block]
  const int32_t* turn;      // [batch]
  const int32_t* first;     // [batch]
  const int32_t* verified;  // [batch]
  const int32_t* length;    // [turns]
  const double* temperature;  // [turns]
  const int64_t* seed;      // [turns]
  int64_t* over;            // [batch, block] what the target has over the draft at a place, in 2^-62; block rule
  int32_t* kept;            // [batch] drafts kept
  int32_t* next;            // [batch] the token after them; -1 in padding
  const int32_t* live;      // turns
  int32_t batch;
  int32_t rows;
  int32_t turns;
  int32_t vocabulary;
  int32_t rule;             // 0 token, 1 block
};

struct AdvanceTurns {
  const int32_t* turn;      // [batch]
  const int32_t* drafts;    // [batch, block]; null, with the next three: one token a turn
  const int32_t* verified;  // [batch]
  const int32_t* first;     // [batch]
  const int32_t* kept;      // [batch]
  const int32_t* next;      // [batch]
  int32_t* length;          // [turns], like the next four
  int32_t* anchor;
  int32_t* generated;       // tokens handed out
  const int32_t* max_tokens;
  int32_t* done;            // 1: ended by the end-of-sentence token, 2: by max_tokens
  int64_t* feed_place;      // [rows] ring row of a verified row's draft context, -1: not committed; may be null
  int32_t* results;         // [result_steps, batch + 1, 6 + block + 1]; see the kernel
  int64_t* sequence;        // [result_steps] 1 + the number of the step that is there, written last
  int64_t* step;            // [1] steps so far
  const int32_t* live;      // turns
  int32_t batch;            // at most 1024
  int32_t turns;
  int32_t rows;
  int32_t ring;
  int32_t fed;              // 1: the anchor was fed, 0: the first token after a prompt
  int32_t eos_id;
  int32_t result_steps;
};

struct AskMasks {
  const int32_t* turn;      // [batch]
  const int32_t* length;    // [turns]
  const int32_t* anchor;    // [turns]
  const int32_t* ids;       // [turns, ring] tokens by position
  const int32_t* drafts;    // [batch, block]; may be null
  const int32_t* verified;  // [batch]; null: no drafts
  const int32_t* ruled;     // [1] 0: no turn of the step keeps to a constraint, nothing is asked
  int32_t* questions;       // [batch + 1, 4 + 2 * block]; see the kernel
  int64_t* asked;           // [1] 1 + the number of the step whose questions are there, written last
  const int64_t* step;      // [1] steps so far
  const int32_t* live;      // turns
  int32_t batch;            // at most 1024
  int32_t turns;
  int32_t ring;
};

struct AwaitMasks {
  const int32_t* ruled;     // [1] as in AskMasks
  const int64_t* answered;  // [1] 1 + the number of the step whose masks are there
  int32_t* late;            // [1] 1: they did not come in time; left alone if they did
  const int64_t* step;      // [1]
  int32_t patience_us;
};

struct MaskLogits {
  float* logits;            // [rows, vocabulary] in place
  const int32_t* masks;     // [batch, block + 1, words] bits of allowed tokens, token 0 in the lowest bit of the first word;
                            // words: a multiple of 4
  const int32_t* masked;    // [batch, block + 1] 0: any token may come
  const int32_t* ruled;     // [1] as in AskMasks
  const int32_t* verified;  // [batch]; null, with the next: a row a turn
  const int32_t* first;     // [batch]
  const int32_t* live;      // turns
  int32_t batch;
  int32_t vocabulary;
  int32_t words;
};

struct RankLogits {
  const float* logits;      // [rows, vocabulary]
  const int32_t* row_slot;  // [rows]
  const int32_t* logprobs;  // [turns] how many of the likeliest tokens a turn is told of; negative: nothing at all
  double* total;            // [rows] log of the sum of e^logit
  int32_t* likeliest;       // [result_steps, most_rows, 20]
  float* likeliest_logprobs;  // [result_steps, most_rows, 20]
  const int64_t* step;      // [1] steps so far
  const int32_t* live;
  int32_t rows;
  int32_t turns;
  int32_t vocabulary;
  int32_t result_steps;
  int32_t most_rows;
};

struct RateTokens {
  const float* logits;      // [rows, vocabulary]
  const double* total;      // [rows] from RankLogits
  const int32_t* row_id;    // [rows] the anchor, then drafts
  const int32_t* turn;      // [batch]
  const int32_t* first;     // [batch]; null: a row a turn
  const int32_t* kept;      // [batch] drafts kept; null: none
  const int32_t* next;      // [batch] the token after them
  const int32_t* logprobs;  // [turns] as in RankLogits
  float* chosen_logprobs;   // [result_steps, most_rows]
  const int64_t* step;      // [1]
  const int32_t* live;      // turns
  int32_t batch;
  int32_t turns;
  int32_t vocabulary;
  int32_t result_steps;
  int32_t most_rows;
};

}  // namespace dsuf
