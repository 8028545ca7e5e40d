// The interface between the binding and the arithmetic: plain structs and one table of functions
// per instruction set. Nothing here is threaded, allocates, or knows Python.
//
// A block of the KV cache is [layer of the group, K or V, KV head, block_size, head_dim]: K and V of
// one layer and KV head are each contiguous. Offsets are 64-bit bytes.
#pragma once

#include <cstdint>

namespace fastdecode {

constexpr int kTileTokens = 32;  // tokens per step of the online softmax

enum DType : std::int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// One layer of a KV partition, as all kernels see it.
struct LayerView {
  char* keys;                // K of KV head 0 in block 0
  std::int64_t block_bytes;  // from one block to the next
  std::int64_t value_bytes;  // from K to V of the same KV head
  std::int64_t head_bytes;   // from one KV head to the next
  std::int32_t block_size;   // tokens
  std::int32_t head_dim;
  std::int32_t dtype;  // of the cache
};

// What stays the same for all items of one attention call.
struct AttendArgs {
  LayerView layer;
  const std::int32_t* blocks;      // block tables of all rows, one after the other
  const std::int64_t* table_base;  // [num_rows] token t of row r lies in blocks[table_base[r] + t / block_size]
  const std::int32_t* positions;   // [num_rows] the newest token, already in the cache
  const char* queries;             // [num_rows, num_heads, head_dim], `query_row_bytes` from row to row
  std::int64_t query_row_bytes;
  char* out;  // [num_rows, num_heads, head_dim], `out_row_bytes` from row to row
  std::int64_t out_row_bytes;
  float* lse;               // [num_rows, num_heads] log of the softmax denominator, or null
  std::int32_t group_size;  // query heads of one KV head
  std::int32_t num_heads;   // query heads
  std::int32_t wire_dtype;  // of queries and out
  float scale;              // of the scores
};

// One (row, KV head) and a run of its tokens.
struct Span {
  std::int32_t row;
  std::int32_t head;   // KV head
  std::int32_t start;  // first token
  std::int32_t stop;   // one past the last token
};

// Where the K and V of some rows go.
struct StoreArgs {
  LayerView layer;
  const std::int64_t* token_bytes;  // [num_rows] offset of the row's token from K of its KV head in block 0
  const char* rows;                 // [num_rows, (K, V), num_kv_heads, head_dim], `row_bytes` from row to row
  std::int64_t row_bytes;
  std::int32_t num_kv_heads;
  std::int32_t wire_dtype;  // of rows
};

// The result of one span, before it is merged: for the query heads of one KV head
//   acc [group_size, head_dim], the weighted sum of V; m [group_size], the largest score;
//   s [group_size], the sum of exp(score - m).
// `partial_floats` and `workspace_floats` give the room that the kernels need, in floats.
std::int64_t partial_floats(std::int32_t group_size, std::int32_t head_dim);
std::int64_t workspace_floats(std::int32_t group_size, std::int32_t head_dim);

// All functions are pure apart from the memory they are told to write, so they may run in any number of
// threads at once, each with its own workspace.
struct Kernels {
  const char* name;
  // Attention of one row's query heads over one span.
  void (*attend_span)(const AttendArgs& args, const Span& span, float* partial, float* workspace);
  // Attention over the newest token, merged after `num_partials` partials of older spans; writes out and lse.
  void (*finish_row)(const AttendArgs& args, std::int32_t row, std::int32_t head, const float* partials,
                     std::int64_t num_partials, float* workspace);
  // Store K and V of one row.
  void (*store_row)(const StoreArgs& args, std::int64_t row);
  // Convert `count` (a multiple of 8) values from one type to another.
  void (*convert)(const void* source, std::int32_t source_dtype, void* target, std::int32_t target_dtype,
                  std::int64_t count);
};

// Instruction sets that this build has and this processor can run, slowest first.
int num_available();
const Kernels* available(int index);

}  // namespace fastdecode
