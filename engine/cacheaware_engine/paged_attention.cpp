// Attention over paged keys and values, on a CPU: blocks are read where they lie, and what several sequences share is read
// once for all of them.
//
// The work is a list of pieces: some neighbouring rows attend to some neighbouring tokens of one block table; of a
// prompt's rows each sees one token more than the one before. A piece and a key head are one unit of work, which leaves
// the weighted sum of its values, its largest score and the sum of its weights; when all are there, the parts of each row
// are merged (the split of FlashDecoding, arXiv:2307.08691, with the online softmax of arXiv:1805.02867).
//
// Within a unit, tokens go in tiles. Few queries use a tile's keys as they are stored; for many they are turned around
// once, so that a vector holds one dimension of many tokens. Eight-bit numbers are widened on the way, and their scales
// are applied to scores and weights, of which there are far fewer.
//
// Plain C++17 with the vector extensions of GCC and Clang; built by `native_build.py`, called by `native_attention.py`.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// The threads are those of the process's OpenMP runtime, the one that torch computes with: threads of another runtime
// would wait, spinning, on the same cores.
extern "C" void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags) __attribute__((weak));

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 4;  // 32 registers: 6 queries × 4 vectors of sums
#elif defined(__AVX__)
constexpr int kLanes = 8, kVectors = 2;  // 16 registers
#else
constexpr int kLanes = 4, kVectors = 2;
#endif
constexpr int kQueries = 6;  // that one pass over a tile serves
constexpr int kTile = 64;    // tokens

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

inline Floats load(const float *from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
inline void store(float *to, Floats value) { std::memcpy(to, &value, sizeof value); }
constexpr int padded(int count) { return (count + kLanes - 1) / kLanes * kLanes; }
inline Floats every(float value) { return value - Floats{}; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// e to the x for x ≤ 0, within 2 units in the last place. What is below -60 counts as -60: that is nothing beside 1, and
// not so little that its products were subnormal, which processors multiply a hundred times slower.
inline Floats exponential(Floats x) {
  x = larger(x, every(-60.0f));
  const Floats rounding = every(12582912.0f);  // 1.5 · 2²³: adding it drops the fraction
  const Floats turns = (x * 1.44269504f + rounding) - rounding;
  const Floats rest = (x - turns * 0.693359375f) + turns * 2.12194440e-4f;
  Floats sum = every(1.98756915e-4f);
  sum = sum * rest + 1.39819995e-3f;
  sum = sum * rest + 8.33345191e-3f;
  sum = sum * rest + 4.16657959e-2f;
  sum = sum * rest + 1.66666655e-1f;
  sum = sum * rest + 5.00000012e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  const Ints exponent = (__builtin_convertvector(turns, Ints) + 127) << 23;
  return sum * (Floats)exponent;
}

// Small whole numbers as 32 bits each. Compilers know the instruction, and do not find it by themselves.
#if defined(__AVX512F__)
inline Ints whole(const int8_t *from) { return Ints(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from))); }
inline Ints whole(const uint8_t *from) { return Ints(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from))); }
inline Ints whole(const uint16_t *from) { return Ints(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from))); }
#elif defined(__AVX2__)
inline Ints whole(const int8_t *from) { return Ints(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from))); }
inline Ints whole(const uint8_t *from) { return Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from))); }
inline Ints whole(const uint16_t *from) { return Ints(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from))); }
#else
template <class Number>
inline Ints whole(const Number *from) {
  Ints values;
  for (int i = 0; i < kLanes; ++i) values[i] = from[i];
  return values;
}
#endif

// How numbers are stored: the kinds of `native_attention.py`.
struct Float32 {
  typedef float Number;
  static Floats widened(const Number *from) { return load(from); }
};
struct BFloat16 {
  typedef uint16_t Number;
  static Floats widened(const Number *from) { return (Floats)(whole(from) << 16); }
};
struct Int8 {
  typedef int8_t Number;
  static Floats widened(const Number *from) { return __builtin_convertvector(whole(from), Floats); }
};
struct Float8 {  // e4m3 without infinities: sign, 4 bits of exponent with bias 7, 3 of fraction
  typedef uint8_t Number;
  static Floats widened(const Number *from) {
    const Ints byte = whole(from), size = (byte & 0x7f) << 20;
    const Ints subnormal = size < 1 << 23;  // -1 where it is: then 1.fraction less 1, with the exponent of the next
    const Floats less = (Floats)(subnormal & (Ints)every(0x1p-6f));
    const Floats value = (Floats)(size + ((120 - subnormal) << 23)) - less;  // from that bias to a float's
    return (Floats)((Ints)value | (byte & 0x80) << 24);
  }
};

// The first `count` numbers; what a vector holds beyond them is 0.
template <class Stored>
inline Floats widened(const void *from, int first, int count) {
  const auto *numbers = static_cast<const typename Stored::Number *>(from) + first;
  if (count >= kLanes) return Stored::widened(numbers);
  typename Stored::Number some[kLanes] = {};
  for (int i = 0; i < count; ++i) some[i] = numbers[i];
  return Stored::widened(some);
}

// Lanes of one and of the other, which are numbered on.
inline Floats mixed(Floats one, Floats other, Ints lanes) {
#if defined(__clang__)
  Floats found;
  for (int i = 0; i < kLanes; ++i) found[i] = lanes[i] < kLanes ? one[lanes[i]] : other[lanes[i] - kLanes];
  return found;
#else
  return __builtin_shuffle(one, other, lanes);
#endif
}

template <int step>
inline Ints turned(bool high) {
  Ints lanes{};
  for (int i = 0; i < kLanes; ++i) {
    const bool of_other = (i & step) != 0;
    const int lane = high ? (of_other ? i : i + step) : (of_other ? i - step : i);
    lanes[i] = of_other ? kLanes + lane : lane;
  }
  return lanes;
}

template <int step>
inline Ints rolled() {
  Ints lanes{};
  for (int i = 0; i < kLanes; ++i) lanes[i] = (i + step) % kLanes;
  return lanes;
}

// Lane i of the one where `step` is not in i, of the other where it is; and what stands `step` lanes beside.
template <int step>
inline Floats straight(Floats one, Floats other) {
  return mixed(one, other, turned<step>(false));
}
template <int step>
inline Floats crossed(Floats one, Floats other) {
  return mixed(one, other, turned<step>(true));
}

// Lanes and vectors change places: afterwards vector i holds lane i of each.
template <int step = 1>
inline __attribute__((always_inline)) void turn(Floats *square) {
  if constexpr (step < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & step) continue;
      const Floats one = square[i], other = square[i + step];
      square[i] = straight<step>(one, other);
      square[i + step] = crossed<step>(one, other);
    }
    turn<step * 2>(square);
  }
}

// A vector whose lane i is the sum of vector i.
template <int step = 1>
inline __attribute__((always_inline)) Floats folded(Floats *square) {
  if constexpr (step < kLanes) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / step / 2; ++i)
      square[i] = straight<step>(square[2 * i], square[2 * i + 1]) + crossed<step>(square[2 * i], square[2 * i + 1]);
    return folded<step * 2>(square);
  }
  return square[0];
}

template <int step = kLanes / 2>
inline float highest(Floats values) {
  if constexpr (step > 0) return highest<step / 2>(larger(values, mixed(values, values, rolled<step>())));
  return values[0];
}
inline float total(Floats values) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += values[i];
  return sum;
}

struct Piece {
  int32_t first_row, rows;
  int32_t table;  // where its block numbers begin in `tables`
  int32_t first, last;  // tokens first … last-1
  int32_t parts;  // rows of the pieces before it
  int32_t from, to;  // of them row i sees those from `from` + i on, and before `to` + i
};

}  // namespace

// What one call does: the structure of that name in `native_attention.py`. All memory is the caller's.
struct Work {
  const float *q;  // [rows, heads, head_dim], rows `q_stride` apart
  float *out;  // [rows, heads, head_dim]
  const void *numbers;  // [slots, 2 · kv_heads, head_dim]: keys, values
  const float *scales;  // [slots, 2 · kv_heads], or null
  const Piece *pieces;
  const int32_t *tables;  // block numbers
  const int32_t *row_parts;  // [Σ rows of pieces] which parts are a row's, row by row
  const int32_t *row_starts;  // [rows + 1] where each row's begin in `row_parts`
  float *parts;  // scratch [Σ rows of pieces, heads, padded head_dim + 2]
  int64_t q_stride;
  int32_t piece_count, rows, block_size, kv_heads, group, head_dim, kind, threads;
  float scale;
};

namespace {

struct Tile {
  int tokens;
  bool scaled;
  int from, to;  // row i of the piece sees tokens from + i … to + i - 1 of it
  const void *keys[kTile], *values[kTile];  // of one head
  alignas(64) float key_scales[kTile], value_scales[kTile];
};

// What one thread needs besides, of one unit.
struct Scratch {
  std::vector<float> turned;  // [padded head_dim, kTile]: a tile's keys, where many queries use them …
  std::vector<float> widened;  // [kTile, padded head_dim]: … and its values
  std::vector<float> queries;  // [queries, padded head_dim], scaled
  std::vector<float> sums;  // [queries, kLanes]: of weights, lane by lane
  std::vector<float> largest;  // [queries]: scores so far
};

// What a piece leaves of one row and head: Σ weight · value, and behind it the largest score and Σ weight.
struct Part {
  float *values;
  float &largest() const { return values[-2]; }
  float &sum() const { return values[-1]; }
};
inline Part part_of(const Work &work, std::size_t row, int head) {
  const std::size_t size = padded(work.head_dim) + 2;
  return {work.parts + (row * work.kv_heads * work.group + head) * size + 2};
}

// scores[query][token] of a tile, for few queries: keys are used as they are stored.
template <class Stored, int count>
inline void score(const Tile &tile, const float *queries, int head_dim, float *scores) {
  for (int first = 0; first < tile.tokens; first += kLanes) {
    Floats products[count][kLanes];
    for (int token = 0; token < kLanes; ++token) {
      Floats sums[count] = {};
      for (int dim = 0; dim < head_dim; dim += kLanes) {
        const Floats key = widened<Stored>(tile.keys[first + token], dim, head_dim - dim);
        for (int i = 0; i < count; ++i) sums[i] += key * load(queries + i * padded(head_dim) + dim);
      }
      for (int i = 0; i < count; ++i) products[i][token] = sums[i];
    }
    for (int i = 0; i < count; ++i) store(scores + i * kTile + first, folded(products[i]));
  }
}

// The same for many, from keys that were turned around.
template <int count>
inline void score(const float *turned, const float *queries, int head_dim, float *scores) {
  for (int token = 0; token < kTile; token += kVectors * kLanes) {
    Floats sums[count][kVectors] = {};
    for (int dim = 0; dim < head_dim; ++dim) {
      Floats keys[kVectors];
      for (int v = 0; v < kVectors; ++v) keys[v] = load(turned + dim * kTile + token + v * kLanes);
      for (int i = 0; i < count; ++i) {
        const Floats query = every(queries[i * padded(head_dim) + dim]);
        for (int v = 0; v < kVectors; ++v) sums[i][v] += query * keys[v];
      }
    }
    for (int i = 0; i < count; ++i)
      for (int v = 0; v < kVectors; ++v) store(scores + i * kTile + token + v * kLanes, sums[i][v]);
  }
}

// values[query] = values[query] · kept[query] + Σ weights[query][token] · value of token, from dimension `dim` on
template <class Stored, int count, int vectors>
inline void weigh(const Tile &tile, const float *weights, const float *kept, const Part *parts, int dim, int head_dim) {
  Floats sums[count][vectors];
  for (int i = 0; i < count; ++i)
    for (int v = 0; v < vectors; ++v) sums[i][v] = load(parts[i].values + dim + v * kLanes) * kept[i];
  for (int token = 0; token < tile.tokens; ++token) {
    Floats value[vectors];
    for (int v = 0; v < vectors; ++v)  // several vectors are whole ones
      value[v] = widened<Stored>(tile.values[token], dim + v * kLanes, vectors == 1 ? head_dim - dim : kLanes);
    for (int i = 0; i < count; ++i) {
      const Floats weight = every(weights[i * kTile + token]);
      for (int v = 0; v < vectors; ++v) sums[i][v] += weight * value[v];
    }
  }
  for (int i = 0; i < count; ++i)
    for (int v = 0; v < vectors; ++v) store(parts[i].values + dim + v * kLanes, sums[i][v]);
}

constexpr float kNothing = -1e30f;  // less than any score
const Ints kPlaces = rolled<0>();

// Adds one tile to what `count` queries, from the `first` of the unit on, have so far. What a row sees none of leaves
// something all the same, which weighs e⁻⁶⁰ as soon as it has seen anything.
template <class Stored, int count>
void add(const Tile &tile, int head_dim, int group, bool turned, int first, const Part *parts, Scratch &scratch) {
  alignas(64) float scores[count * kTile];
  float kept[count];
  const float *queries = scratch.queries.data() + first * padded(head_dim);
  if (turned)
    score<count>(scratch.turned.data(), queries, head_dim, scores);
  else
    score<Stored, count>(tile, queries, head_dim, scores);
  for (int i = 0; i < count; ++i) {
    float *mine = scores + i * kTile, *sums = scratch.sums.data() + (first + i) * kLanes;
    float &largest = scratch.largest[first + i];
    Floats most = every(kNothing);
    const int row = (first + i) / group, from = tile.from + row, to = std::min(tile.to + row, tile.tokens);
    for (int token = 0; token < tile.tokens; token += kLanes) {
      Floats some = load(mine + token);
      if (tile.scaled) some *= load(tile.key_scales + token);
      if (token < from || token + kLanes > to) {
        const Ints place = kPlaces + token;
        some = (place >= from) & (place < to) ? some : every(kNothing);
      }
      store(mine + token, some);
      most = larger(most, some);
    }
    const float now = std::max(largest, highest(most));
    kept[i] = now == largest ? 1.0f : exponential(every(largest - now))[0];
    largest = now;
    Floats sum = load(sums) * kept[i];
    for (int token = 0; token < tile.tokens; token += kLanes) {
      Floats weight = exponential(load(mine + token) - now);
      sum += weight;  // what stands for no token weighs e⁻⁶⁰
      if (tile.scaled) weight *= load(tile.value_scales + token);
      store(mine + token, weight);
    }
    store(sums, sum);
  }
  int dim = 0;
  for (; dim + kVectors * kLanes <= head_dim; dim += kVectors * kLanes)
    weigh<Stored, count, kVectors>(tile, scores, kept, parts, dim, head_dim);
  for (; dim < head_dim; dim += kLanes) weigh<Stored, count, 1>(tile, scores, kept, parts, dim, head_dim);
}

// Prepares a tile for many queries: its keys turned around, its values as floats.
template <class Stored>
void prepare(Tile &tile, int head_dim, Scratch &scratch) {
  for (int token = 0; token < kTile; token += kLanes)
    for (int dim = 0; dim < head_dim; dim += kLanes) {
      Floats square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = widened<Stored>(tile.keys[token + i], dim, head_dim - dim);
      turn(square);
      for (int i = 0; i < kLanes; ++i) store(scratch.turned.data() + (dim + i) * kTile + token, square[i]);
    }
  if (std::is_same<Stored, Float32>::value) return;
  for (int token = 0; token < tile.tokens; ++token) {
    float *values = scratch.widened.data() + token * padded(head_dim);
    for (int dim = 0; dim < head_dim; dim += kLanes)
      store(values + dim, widened<Stored>(tile.values[token], dim, head_dim - dim));
    tile.values[token] = values;
  }
}

// Adds one tile to what all queries of a unit have so far.
template <class Stored>
void add_to_all(const Tile &tile, const Work &work, const Piece &piece, int kv_head, bool turned, Scratch &scratch) {
  const int group = work.group, queries = piece.rows * group;
  for (int i = 0; i < queries; i += kQueries) {
    const int count = std::min(kQueries, queries - i);
    Part parts[kQueries];
    for (int j = 0; j < count; ++j)
      parts[j] = part_of(work, piece.parts + (i + j) / group, kv_head * group + (i + j) % group);
    switch (count) {
      case 1: add<Stored, 1>(tile, work.head_dim, group, turned, i, parts, scratch); break;
      case 2: add<Stored, 2>(tile, work.head_dim, group, turned, i, parts, scratch); break;
      case 3: add<Stored, 3>(tile, work.head_dim, group, turned, i, parts, scratch); break;
      case 4: add<Stored, 4>(tile, work.head_dim, group, turned, i, parts, scratch); break;
      case 5: add<Stored, 5>(tile, work.head_dim, group, turned, i, parts, scratch); break;
      default: add<Stored, kQueries>(tile, work.head_dim, group, turned, i, parts, scratch);
    }
  }
}

template <class Stored>
void attend(const Work &work, const Piece &piece, int kv_head, Scratch &scratch) {
  typedef typename Stored::Number Number;
  const int dims = work.head_dim, size = padded(dims), group = work.group;
  const int queries = piece.rows * group;
  const bool many = queries > kQueries;
  scratch.turned.resize(size * kTile);
  scratch.widened.resize(size * kTile);
  scratch.queries.assign(queries * size, 0.0f);
  scratch.sums.assign(queries * kLanes, 0.0f);
  scratch.largest.assign(queries, kNothing);
  const auto part = [&](int i) { return part_of(work, piece.parts + i / group, kv_head * group + i % group); };
  for (int i = 0; i < queries; ++i) {
    const float *query = work.q + (piece.first_row + i / group) * work.q_stride + (kv_head * group + i % group) * dims;
    for (int dim = 0; dim < dims; ++dim) scratch.queries[i * size + dim] = query[dim] * work.scale;
    std::fill_n(part(i).values, size, 0.0f);
  }

  const auto *numbers = static_cast<const Number *>(work.numbers);
  const std::size_t heads = std::size_t(2) * work.kv_heads;
  const int32_t *block = work.tables + piece.table + piece.first / work.block_size;
  int offset = piece.first % work.block_size;
  Tile tile;
  tile.scaled = work.scales != nullptr;
  for (int first = piece.first; first < piece.last; first += kTile) {
    tile.tokens = std::min(kTile, piece.last - first);
    tile.from = piece.from - first, tile.to = piece.to - first;
    for (int i = 0; i < tile.tokens; ++i) {
      const std::size_t row = (std::size_t(*block) * work.block_size + offset) * heads + kv_head;
      const Number *key = numbers + row * dims, *value = key + std::size_t(work.kv_heads) * dims;
      tile.keys[i] = key, tile.values[i] = value;
      if (tile.scaled)
        tile.key_scales[i] = work.scales[row], tile.value_scales[i] = work.scales[row + work.kv_heads];
      for (int dim = 0; dim < dims; dim += 64 / int(sizeof(Number))) __builtin_prefetch(value + dim);
      if (++offset == work.block_size) offset = 0, ++block;
    }
    for (int i = tile.tokens; i < kTile; ++i) {  // read with the others, and then hidden
      tile.keys[i] = tile.keys[0];
      tile.key_scales[i] = tile.value_scales[i] = 0;
    }
    if (many) {
      prepare<Stored>(tile, dims, scratch);
      add_to_all<Float32>(tile, work, piece, kv_head, true, scratch);
    } else {
      add_to_all<Stored>(tile, work, piece, kv_head, false, scratch);
    }
  }
  for (int i = 0; i < queries; ++i) {
    part(i).largest() = scratch.largest[i];
    part(i).sum() = total(load(scratch.sums.data() + i * kLanes));
  }
}

void merge(const Work &work, int row) {
  const int dims = work.head_dim, heads = work.kv_heads * work.group;
  const int32_t *first = work.row_parts + work.row_starts[row], *last = work.row_parts + work.row_starts[row + 1];
  for (int head = 0; head < heads; ++head) {
    float most = kNothing, sum = 0;
    for (const int32_t *i = first; i < last; ++i) most = std::max(most, part_of(work, *i, head).largest());
    const Part all = part_of(work, *first, head);  // gathers the others
    for (const int32_t *i = first; i < last; ++i) {
      const Part part = part_of(work, *i, head);
      const float weight = exponential(every(part.largest() - most))[0];
      sum += weight * part.sum();
      for (int dim = 0; dim < dims; dim += kLanes) {
        const Floats values = weight * load(part.values + dim);
        store(all.values + dim, i == first ? values : load(all.values + dim) + values);
      }
    }
    float *out = work.out + (std::size_t(row) * heads + head) * dims;
    for (int dim = 0; dim < dims; ++dim) out[dim] = all.values[dim] / sum;
  }
}

struct Team {
  const Work &work;
  std::atomic<int> next{0};  // the unit that nobody has taken
  std::vector<std::atomic<int>> left;  // units that a row still waits for
};

void take_part(void *data) {
  Team &team = *static_cast<Team *>(data);
  const Work &work = team.work;
  Scratch scratch;
  for (int unit; (unit = team.next++) < work.piece_count * work.kv_heads;) {
    const Piece &piece = work.pieces[unit / work.kv_heads];
    const int kv_head = unit % work.kv_heads;
    switch (work.kind) {
      case 0: attend<Float32>(work, piece, kv_head, scratch); break;
      case 1: attend<BFloat16>(work, piece, kv_head, scratch); break;
      case 2: attend<Int8>(work, piece, kv_head, scratch); break;
      default: attend<Float8>(work, piece, kv_head, scratch);
    }
    // Whoever does the last unit of a row merges it: nobody waits for the others before that.
    for (int row = piece.first_row; row < piece.first_row + piece.rows; ++row)
      if (--team.left[row] == 0) merge(work, row);
  }
}

}  // namespace

extern "C" {

// Numbers that a vector holds: `parts` are padded to a multiple of it. 0: there are no threads to share work with.
int lanes() { return GOMP_parallel != nullptr ? kLanes : 0; }

void attend_paged(const Work *work) {
  Team team{*work, {0}, std::vector<std::atomic<int>>(work->rows)};
  for (int row = 0; row < work->rows; ++row)
    team.left[row] = (work->row_starts[row + 1] - work->row_starts[row]) * work->kv_heads;
  if (work->threads > 1)
    GOMP_parallel(take_part, &team, unsigned(work->threads), 0);
  else
    take_part(&team);
}

}  // extern "C"
