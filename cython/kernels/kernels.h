// The interface between the binding and the arithmetic: plain structs and one table of functions
// per instruction set. Nothing here is threaded, allocates, or knows Python.
//
// A block of the KV cache is [layer of the group, KV head, (K, V)], each part contiguous; offsets are 64-bit bytes.
// Values are quantised or not by part; kPanelTokens tokens are a panel:
//   K        [block_size / 8][head_dim][8 tokens]     a vector of tokens at one d: scores need no horizontal sums
//   V        [block_size][head_dim]                   a vector along head_dim of one token
// Quantised, two numbers that are multiplied and added in one instruction lie together: of K two neighbours along
// head_dim, of V two tokens.
//   int8     K codes [block_size / 8][head_dim / 2][8 tokens][2], V codes [block_size / 2][head_dim][2 tokens]
//            then float scale [block_size]            value = scale * code
//   int4     16-bit words hold four codes, the first in the low bits; a group is 32 values along head_dim:
//            K words [block_size / 8][4 groups][8 tokens][2], the first head_dim / 4 of a token used; the codes of a
//            word follow each other along head_dim;
//            V words [block_size / 2][groups][8][2 tokens], code i of word j is value 8 i + j of its group
//            then half scale [groups][block_size], half minimum [groups][block_size]; value = minimum + scale * code
#pragma once

#include <cstdint>

namespace fastdecode {

constexpr int kPanelTokens = 8;
constexpr int kTileTokens = 64;  // tokens per step of the online softmax
constexpr int kGroupDim = 32;    // values along head_dim that share an int4 scale and minimum
constexpr int kMaxHeadDim = 256;

enum DType : std::int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3, kInt4 = 4 };

// One layer of a KV partition, as all kernels see it.
struct LayerView {
  char* keys;                // K of KV head 0 in block 0
  std::int64_t block_bytes;  // from one block to the next
  std::int64_t head_bytes;   // from one KV head to the next
  std::int64_t value_bytes;  // from K to V of the same KV head
  std::int32_t block_size;   // tokens, a multiple of kPanelTokens
  std::int32_t head_dim;
  std::int32_t key_dtype;
  std::int32_t value_dtype;
};

// One layer of a cache, and where the tokens of all rows lie in it.
struct Cache {
  LayerView layer;
  const std::int32_t* blocks;      // block tables of all rows, one after the other
  const std::int64_t* table_base;  // [num_rows] token t of row r lies in blocks[table_base[r] + t / block_size]
};

// What stays the same for all items of one attention call.
struct AttendArgs {
  Cache caches[2];                // of all tokens, and if that is quantised, of the most recent ones as they came
  const std::int32_t* positions;  // [num_rows] the newest token, already in the cache
  const char* queries;            // [num_rows, num_heads, head_dim], `query_row_bytes` from row to row
  std::int64_t query_row_bytes;
  char* out;  // [num_rows, num_heads, head_dim], `out_row_bytes` from row to row
  std::int64_t out_row_bytes;
  float* lse;                 // [num_rows, num_heads] log of the softmax denominator, or null
  std::int32_t newest_cache;  // where the newest token is read
  std::int32_t head_dim;
  std::int32_t group_size;  // query heads of one KV head
  std::int32_t num_heads;   // query heads
  std::int32_t wire_dtype;  // of queries and out
  float scale;              // of the scores
  float softcap;            // scores become softcap * tanh(score / softcap); 0: they stay
  const float* sinks;       // [num_heads] a score without a value beside the others, or null
};

// One (row, KV head) and a run of its tokens.
struct Span {
  std::int32_t row;
  std::int32_t head;   // KV head
  std::int32_t start;  // first token
  std::int32_t stop;   // one past the last token
  std::int32_t cache;  // which of the two
};

// Where the K and V of some rows go.
struct StoreArgs {
  LayerView layer;
  const std::int64_t* places;  // [num_rows] block * block_size + place in the block, of the row's token
  const char* rows;            // [num_rows, (K, V), num_kv_heads, head_dim], `row_bytes` from row to row
  std::int64_t row_bytes;
  std::int32_t num_kv_heads;
  std::int32_t wire_dtype;  // of rows
};

// Causal attention of consecutive tokens of one sequence: query i, at position start + i, sees the keys up to its own.
struct PromptArgs {
  const char* queries;  // [num_queries, num_heads, head_dim], `query_row_bytes` from row to row, and so on
  const char* keys;     // [start + num_queries, num_kv_heads, head_dim]
  const char* values;   // as keys
  char* out;            // as queries
  std::int64_t query_row_bytes;
  std::int64_t key_row_bytes;
  std::int64_t value_row_bytes;
  std::int64_t out_row_bytes;
  std::int64_t start;
  std::int64_t window;      // keys that a query sees, its own included; 0: all
  std::int32_t group_size;  // query heads of one KV head
  std::int32_t head_dim;
  std::int32_t dtype;  // of all four: float, half or bfloat16
  float scale;         // of the scores
  float softcap;       // as in AttendArgs
  const float* sinks;  // as in AttendArgs
};

// Bytes of one token's K (or V) of one KV head, scales included.
std::int64_t token_bytes(std::int32_t dtype, std::int32_t head_dim);

// The result of one span, before it is merged: for the query heads of one KV head
//   acc [group_size, head_dim], the weighted sum of V; m [group_size], the largest score;
//   s [group_size], the sum of exp(score - m).
// `partial_floats` and `workspace_floats` give the room that the kernels need, in floats.
std::int64_t partial_floats(std::int32_t group_size, std::int32_t head_dim);
std::int64_t workspace_floats(std::int32_t group_size, std::int32_t head_dim);

// The same for `attend_prompt` of that many queries.
constexpr int kMaxPanelRows = 48;  // rows that lie together there, at most
std::int64_t prompt_workspace_floats(std::int64_t num_queries, std::int32_t group_size, std::int32_t head_dim);

// Rows times a matrix [num_out, num_in], for the S-Part; kPanelOut outputs are a panel. Of floats:
//   float32  [panels][num_in][32 outputs]
//   bfloat16 [panels][num_in / 2][32 outputs][2 inputs], `num_in` being even
constexpr int kPanelOut = 32;
constexpr int kProductRows = 96;   // that one after the other are multiplied with a panel, at most
constexpr int kProductIn = 768;    // whose weights in a panel stay in a cache meanwhile
constexpr int kProductBlocks = 4;  // of rows, that are multiplied with a panel before the next one is read

struct Product {
  const void* rows;
  std::int64_t row_stride;  // values from row to row
  std::int64_t num_rows;
  std::int64_t block_rows;  // of a unit, from 1 to kProductRows
  std::int64_t num_in;
  std::int64_t num_out;
  const void* weights;
  const float* bias;  // [num_out], or null
  void* out;          // [num_rows, num_out]
  // Rows are float32; those of bfloat16 weights may be bfloat16 where `has_pair_products`. `out` is one of these.
  std::int32_t row_dtype;
  std::int32_t weight_dtype;
  std::int32_t out_dtype;
};

// Of 8 bits: kGroupIn inputs are a group, and kScaleIn inputs of an output share a scale and an offset; the last ones
// may be fewer:
//   codes    [groups][panels][inputs of the group][32 outputs]; value = offset + scale * code
//   scales, offsets   [num_in / 32][panels][32 outputs]
// so that whoever computes some panels reads runs of memory, once for kRowBlock rows.
constexpr int kGroupIn = 128;
constexpr int kScaleIn = 32;
constexpr int kRowBlock = 240;

struct Int8Product {
  const float* rows;
  std::int64_t row_stride;  // floats from row to row
  std::int64_t num_rows;
  std::int64_t num_in;
  std::int64_t num_panels;
  const std::int8_t* codes;
  const float* scales;
  const float* offsets;
  float* out;  // [num_rows, num_panels * kPanelOut]
};

std::int64_t product_floats();

// All functions are pure apart from the memory they are told to write, so they may run in any number of
// threads at once, each with its own workspace (64-byte aligned).
struct Kernels {
  const char* name;
  // Attention of one row's query heads over one span. `next`, if not null, is what this thread reads afterwards.
  void (*attend_span)(const AttendArgs& args, const Span& span, const Span* next, float* partial, float* workspace);
  // Attention over the newest token, merged after `num_partials` partials of older spans; writes out and lse.
  void (*finish_row)(const AttendArgs& args, std::int32_t row, std::int32_t head, const float* partials,
                     std::int64_t num_partials, float* workspace);
  // Store K and V of one row.
  void (*store_row)(const StoreArgs& args, std::int64_t row);
  // Convert `count` (a multiple of 8) values from one wire type to another.
  void (*convert)(const void* source, std::int32_t source_dtype, void* target, std::int32_t target_dtype,
                  std::int64_t count);
  // exp of `count` (a multiple of 16) values that are at most 0, as the softmax computes it.
  void (*exp_nonpositive)(const float* source, float* target, std::int64_t count);
  // Sum of `count` floats, to measure how fast memory is read: variants 0 to 2 keep 1, 4 and 8 running sums,
  // 3 to 5 do the same with prefetches.
  float (*read_loop)(const float* data, std::int64_t count, int variant);
  // The rest is the S-Part's: one row at a time, of float, half or bfloat16, computed in float. No alignment is
  // assumed, and all instruction sets give the same bits, attention excepted.
  // Root-mean-square norm of `count` values, rounded, times weights of the same type.
  void (*rms_norm)(const void* row, const void* weights, void* target, std::int32_t dtype, std::int64_t count,
                   float eps);
  // silu(gate), rounded, times up: [gate|up] of `count` values each to `count` values.
  void (*swiglu)(const void* gate_up, void* target, std::int32_t dtype, std::int64_t count);
  // Rotate heads, `head_stride` values from one to the next, in place: value i < pairs goes with value i + pairs.
  // `angles` are the cosines, then the sines of all pairs.
  void (*rotate)(void* heads, const float* angles, std::int32_t dtype, std::int64_t num_heads,
                 std::int64_t head_stride, std::int64_t pairs);
  // Convert any number of values, as `convert` does; how many finite ones were beyond the target's range.
  std::int64_t (*to_wire)(const void* source, std::int32_t source_dtype, void* target, std::int32_t target_dtype,
                          std::int64_t count);
  // Attention of queries [first, stop) with one KV head.
  void (*attend_prompt)(const PromptArgs& args, std::int64_t head, std::int64_t first, std::int64_t stop,
                        float* workspace);
  // Columns of some panels of the rows' products with weights of 8 bits. `workspace` has product_floats() and is
  // 64-byte aligned.
  void (*multiply_int8)(const Int8Product& product, std::int64_t first_panel, std::int64_t last_panel,
                        float* workspace);
  // Some units of a product; one is a panel with a block of rows.
  void (*multiply)(const Product& product, std::int64_t first_unit, std::int64_t last_unit);
  bool has_pair_products;
  // The first of the largest values; -1 where not all of them are finite.
  std::int64_t (*pick)(const float* row, std::int64_t count);
};

// Instruction sets that this build has and this processor can run, slowest first.
int num_available();
const Kernels* available(int index);

}  // namespace fastdecode
