/* Rotation of channel pairs in one pass on the CPU: reads x once, writes the result once.
   Compiled by numbers/native.py; called by cpu.py. */

#include "floats.h"
#include <stdlib.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "The halves of a word lie the other way round here."
#endif

/* Strides count numbers. A row is one head of one token: `pairs` pairs, then `rest` channels that
   pass through. Tokens are done `tile` at a time, all heads of them, so that their cosines stay in
   the core's cache. */
typedef struct {
  const void *x;
  void *out;
  const float *cos, *sin;
  int64_t heads, length, tile, pairs, rest, x_step[3], out_step[3]; /* of batch, head and token */
  int64_t table_batch, interleaved;
} Rotation;

#define ROW(name, T)                                                                               \
  static inline void name##_##T(const T *restrict x, T *restrict out, const float *restrict cos,   \
                                const float *restrict sin, int64_t pairs)

ROW(split, f32) {
  for (int64_t i = 0; i < pairs; i++) {
    float a = x[i], b = x[i + pairs], c = cos[i], s = sin[i];
    out[i] = a * c - b * s;
    out[i + pairs] = b * c + a * s;
  }
}

ROW(interleaved, f32) {
  for (int64_t i = 0; i < pairs; i++) {
    float a = x[2 * i], b = x[2 * i + 1], c = cos[i], s = sin[i];
    out[2 * i] = a * c - b * s;
    out[2 * i + 1] = b * c + a * s;
  }
}

/* bfloat16 is done two neighbours at a time, the halves of a word: no number changes its place.
   So cosines and sines of even pairs lie before those of odd ones, see order(). */
typedef uint32_t __attribute__((aligned(2), may_alias)) word;

static inline float number(uint32_t bits) {
  float v;
  memcpy(&v, &bits, sizeof v);
  return v;
}
static inline float lower(word w) { return number(w << 16); }
static inline float upper(word w) { return number(w & 0xffff0000); }

/* narrow(), before its lower half is dropped, where no NaN has bits in that half that could carry:
   those of x have none, order() takes them from the tables, and 0 * inf makes none. */
static inline uint32_t rounded(float v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  return bits + 0x7fff + (bits >> 16 & 1);
}
static inline word joined(float low, float high) {
  return rounded(low) >> 16 | (rounded(high) & 0xffff0000);
}

ROW(split, bf16) {
  int64_t half = pairs / 2, last = pairs - 1;
  const word *first = (const word *)x, *second = (const word *)(x + pairs);
  word *to_first = (word *)out, *to_second = (word *)(out + pairs);
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    float a = lower(first[i]), b = lower(second[i]), c = cos[i], s = sin[i];
    float e = upper(first[i]), f = upper(second[i]), d = cos[half + i], t = sin[half + i];
    to_first[i] = joined(a * c - b * s, e * d - f * t);
    to_second[i] = joined(b * c + a * s, f * d + e * t);
  }
  if (pairs % 2) {
    float a = widen(x[last]), b = widen(x[last + pairs]), c = cos[last], s = sin[last];
    out[last] = narrow(a * c - b * s);
    out[last + pairs] = narrow(b * c + a * s);
  }
}

ROW(interleaved, bf16) {
  const word *from = (const word *)x;
  word *to = (word *)out;
#pragma omp simd
  for (int64_t i = 0; i < pairs; i++) {
    float a = lower(from[i]), b = upper(from[i]), c = cos[i], s = sin[i];
    to[i] = joined(a * c - b * s, b * c + a * s);
  }
}

/* A NaN without bits that could carry. */
static inline float no_bits(float v) { return v == v ? v : __builtin_nanf(""); }

/* A table's rows as the rows of bfloat16 want them. */
static inline void order(const float *restrict from, float *restrict to, int64_t rows,
                         int64_t interleaved, int64_t pairs) {
  int64_t half = interleaved ? 0 : pairs / 2;
  for (int64_t row = 0; row < rows; row++, from += pairs, to += pairs) {
    for (int64_t i = 0; i < half; i++) {
      to[i] = no_bits(from[2 * i]);
      to[half + i] = no_bits(from[2 * i + 1]);
    }
    for (int64_t i = 2 * half; i < pairs; i++) to[i] = no_bits(from[i]);
  }
}

/* With a constant number of pairs a row is a few vectors and no loop. */
#define WITH_PAIRS(function, ...)                                                                  \
  (of->pairs == 16   ? function(__VA_ARGS__, 16)                                                   \
   : of->pairs == 32 ? function(__VA_ARGS__, 32)                                                   \
   : of->pairs == 64 ? function(__VA_ARGS__, 64)                                                   \
                     : function(__VA_ARGS__, of->pairs))

#define ROTATE(T)                                                                                  \
  static inline __attribute__((always_inline)) void tile_##T(                                      \
      const T *x, T *out, const float *cos, const float *sin, const Rotation *of, int64_t tokens,  \
      int64_t interleaved, int64_t pairs) {                                                        \
    for (int64_t head = 0; head < of->heads; head++)                                               \
      for (int64_t token = 0; token < tokens; token++) {                                           \
        const T *from = x + head * of->x_step[1] + token * of->x_step[2];                          \
        T *to = out + head * of->out_step[1] + token * of->out_step[2];                            \
        const float *c = cos + token * pairs, *s = sin + token * pairs;                            \
        if (interleaved)                                                                           \
          interleaved_##T(from, to, c, s, pairs);                                                  \
        else                                                                                       \
          split_##T(from, to, c, s, pairs);                                                        \
        if (of->rest) memcpy(to + 2 * pairs, from + 2 * pairs, of->rest * sizeof(T));              \
      }                                                                                            \
  }                                                                                                \
  /* Tiles first..last of (batch, tiles of a sequence). */                                         \
  int rotate_##T(const Rotation *of, int64_t first, int64_t last) {                                \
    int64_t tiles = (of->length + of->tile - 1) / of->tile, pairs = of->pairs;                     \
    float *ordered = sizeof(T) == 2 ? malloc(2 * of->tile * pairs * sizeof(float)) : NULL;         \
    if (sizeof(T) == 2 && !ordered) return 1;                                                      \
    for (int64_t i = first; i < last; i++) {                                                       \
      int64_t batch = i / tiles, start = i % tiles * of->tile;                                     \
      int64_t tokens = start + of->tile < of->length ? of->tile : of->length - start;              \
      int64_t table = batch * of->table_batch + start * pairs;                                     \
      const T *from = (const T *)of->x + batch * of->x_step[0] + start * of->x_step[2];            \
      T *to = (T *)of->out + batch * of->out_step[0] + start * of->out_step[2];                    \
      const float *c = of->cos + table, *s = of->sin + table;                                      \
      if (ordered) {                                                                               \
        float *other = ordered + tokens * pairs;                                                   \
        WITH_PAIRS(order, c, ordered, tokens, of->interleaved);                                    \
        WITH_PAIRS(order, s, other, tokens, of->interleaved);                                      \
        c = ordered, s = other;                                                                    \
      }                                                                                            \
      if (of->interleaved)                                                                         \
        WITH_PAIRS(tile_##T, from, to, c, s, of, tokens, 1);                                       \
      else                                                                                         \
        WITH_PAIRS(tile_##T, from, to, c, s, of, tokens, 0);                                       \
    }                                                                                              \
    free(ordered);                                                                                 \
    return 0;                                                                                      \
  }

ROTATE(f32)
ROTATE(bf16)
