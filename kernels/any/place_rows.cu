// Where the rows of a pass read and write the caches, from whose rows they are and at which positions.
//
//   place_rows  places in rings and entry stores, what a row may see, waiting halves, Engram history, window lists
//   keep_ids    the rows' tokens into the rings of ids; after place_rows, which reads what was there before
//
// Shapes: PlaceRows, KeepIds. Rows of a turn are neighbours in the launch, one position after the other, so a row at
// distance d is of the same turn exactly if its slot is. A place is a row of a store that all turns share: rings lie
// turn by turn; entries of ratio n have page_tokens / n rows a page, found through the turn's page table. Of rows that
// would take one place in a ring, only the last does. A group's first half waits in one of `halves` places by group
// number, those of the last halves - 1 groups of the launch; where the place is the one that the turn's first row
// reads, that row is told (keep -2 - r) to put row r there once it has read. A window list has the last positions down
// to the floor, oldest first, then -1, as the reference orders them. A turn's first token without an id, going back,
// ends its history.
// Grid: place_rows a block of 128 a row, keep_ids 128 rows a block. Padding: -1, positions and reachable zero.
// Bound: latency.
#include "contract.h"
#include "launch.cuh"

namespace dsuf {

// The row of a store in which entry `entry` of a turn stands, -1 where the turn has no page for it.
__device__ __forceinline__ int64_t entry_row(const PlaceRows& p, const int32_t* table, int entry, int ratio) {
  const int page_rows = p.page_tokens / ratio, page = entry / page_rows;
  const int physical = page < p.table_pages ? table[page] : -1;
  return physical < 0 ? -1 : int64_t(physical) * page_rows + entry % page_rows;
}

// Row `row` of the launch if it is one of `slot`'s, else -1.
__device__ __forceinline__ int own_row(const int32_t* row_slot, int row, int live, int slot) {
  return row >= 0 && row < live && row_slot[row] == slot ? row : -1;
}

// Whether a row with the first half of a group is among those that are kept.
__device__ __forceinline__ bool waits(const PlaceRows& p, int row, int live, int slot) {
  return own_row(p.row_slot, row + 2 * (p.halves - 1), live, slot) < 0;
}

__device__ void place_numbers(const PlaceRows& p, int row, int live, int slot, int position) {
  const int32_t* table = p.table + int64_t(slot) * p.table_pages;
  const bool completes = position % 2;
  const int before = own_row(p.row_slot, row - 1, live, slot), group = position / 2;
  const int64_t half = int64_t(slot) * p.halves + group % p.halves;
  p.positions[row] = position;
  p.group_positions[row] = position / 2 * 2;
  p.ring_place[row] =
      own_row(p.row_slot, row + p.ring, live, slot) < 0 ? int64_t(slot) * p.ring + position % p.ring : -1;
  p.entry_place[row] = entry_row(p, table, position, 1);
  p.entry_place[p.rows + row] = completes ? entry_row(p, table, group, 2) : -1;
  p.reachable[row] = position + 1;
  p.reachable[p.rows + row] = (position + 1) / 2;
  p.keep[row] = completes || !waits(p, row, live, slot) ? -1 : half;
  p.partner[row] = !completes ? -1 : before >= 0 ? before : -2 - half;
}

// Of a turn's first row, if it completes a group, and the row whose half takes the place that it reads: each finds the
// other, and the first keeps for both. After place_numbers; all threads of the block look.
__device__ void hand_over(const PlaceRows& p, int row, int live, int slot, int position) {
  const bool first = own_row(p.row_slot, row - 1, live, slot) < 0;
  if (position % 2 ? !first : !waits(p, row, live, slot)) return;
  for (int apart = 2 * p.halves * (threadIdx.x + 1) - 1; apart < p.rows; apart += 2 * p.halves * 128) {
    const int other = own_row(p.row_slot, position % 2 ? row + apart : row - apart, live, slot);
    if (other < 0) continue;
    if (position % 2 && waits(p, other, live, slot)) p.keep[row] = -2 - other;
    if (position % 2 == 0 && own_row(p.row_slot, other - 1, live, slot) < 0) p.keep[row] = -1;
  }
}

__device__ void place_history(const PlaceRows& p, int row, int live, int slot, int position) {
  bool known = true;
  for (int s = 0; s < DSUF_ENGRAM_SHIFTS; ++s) {
    const int at = position - s, own = own_row(p.row_slot, row - s, live, slot);
    const int id = at < 0 ? -1 : own >= 0 ? p.row_id[own] : p.ids[int64_t(slot) * p.ring + at % p.ring];
    known = known && id >= 0;
    p.history[int64_t(row) * DSUF_ENGRAM_SHIFTS + s] = known ? p.engram_ids[id] : p.pad_id;
  }
}

__device__ void clear_numbers(const PlaceRows& p, int row) {
  p.positions[row] = p.group_positions[row] = 0;
  p.ring_place[row] = p.entry_place[row] = p.entry_place[p.rows + row] = p.keep[row] = p.partner[row] = -1;
  p.reachable[row] = p.reachable[p.rows + row] = 0;
  for (int s = 0; s < DSUF_ENGRAM_SHIFTS; ++s) p.history[int64_t(row) * DSUF_ENGRAM_SHIFTS + s] = p.pad_id;
}

}  // namespace dsuf

extern "C" __global__ void __launch_bounds__(128) place_rows(const dsuf::PlaceRows p) {
  using namespace dsuf;
  await_inputs();
  constexpr int kWindow = DSUF_WINDOW;
  const int row = blockIdx.x, live = min(*p.live, p.rows), slot = row < live ? p.row_slot[row] : -1;
  const bool counts = slot >= 0 && slot < p.turns;
  const int position = counts ? p.row_position[row] : 0;
  if (threadIdx.x == 0) {
    if (counts)
      place_numbers(p, row, live, slot, position);
    else
      clear_numbers(p, row);
  }
  __syncthreads();
  if (counts) hand_over(p, row, live, slot, position);
  if (threadIdx.x == 32 && counts) place_history(p, row, live, slot, position);
  for (int kind = 0; kind < 3; ++kind) {
    const int oldest = counts ? max(position - (kWindow - 1), max(p.floors[slot * 4 + kind], 0)) : 0;
    for (int i = threadIdx.x; i < kWindow; i += 128) {
      const int at = oldest + i, own = counts ? own_row(p.row_slot, row - (position - at), live, slot) : -1;
      const int from = p.fresh && own >= 0 ? -2 - own : slot * p.ring + at % p.ring;
      p.windows[(int64_t(kind) * p.rows + row) * kWindow + i] = counts && at <= position ? from : -1;
    }
  }
}

extern "C" __global__ void __launch_bounds__(128) keep_ids(const dsuf::KeepIds p) {
  dsuf::await_inputs();
  const int row = blockIdx.x * 128 + threadIdx.x, live = min(*p.live, p.rows);
  if (row >= live) return;
  const int slot = p.row_slot[row];
  if (slot < 0 || slot >= p.turns) return;
  if (row + p.ring < live && p.row_slot[row + p.ring] == slot) return;
  p.ids[int64_t(slot) * p.ring + p.row_position[row] % p.ring] = p.row_id[row];
}
