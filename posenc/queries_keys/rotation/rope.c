/* Rotation of channel pairs in one pass on the CPU: reads x once, writes the result once.
   Compiled by numbers/native.py; called by cpu.py. */

#include "floats.h"

/* Strides count numbers. A row is one head of one token: `pairs` pairs, then `rest` channels that
   pass through. Tokens are done `tile` at a time, all heads of them, so that their cosines stay in
   the core's cache; tiles first..last of (batch, tiles of a sequence), so that callers can share
   the work out. */
typedef struct {
  int64_t heads, length, tile, pairs, rest;
  int64_t x_batch, x_head, x_token;
  int64_t out_batch, out_head, out_token;
  int64_t table_batch, interleaved;
} Shape;

/* Bytes ahead of a row that are asked for, and bytes in a line of the cache. */
#define AHEAD 2048
#define LINE 64

/* Ask for a row to read and a row to write; no address is too far to be asked for. */
static inline void fetch(const char *x, char *out, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += LINE) {
    __builtin_prefetch(x + i);
    __builtin_prefetch(out + i, 1);
  }
}

/* A constant number of pairs fills vectors where a variable one of few pairs is done singly. */
#define BY_PAIRS(function, ...)                                                                    \
  (pairs == 16 ? function(__VA_ARGS__, 16) : function(__VA_ARGS__, pairs))

#define ROTATE(T)                                                                                  \
  static inline void split_##T(const T *restrict x, T *restrict out, const float *restrict cos,    \
                               const float *restrict sin, int64_t pairs) {                         \
    for (int64_t i = 0; i < pairs; i++) {                                                          \
      float a = load_##T(x[i]), b = load_##T(x[i + pairs]), c = cos[i], s = sin[i];                \
      out[i] = store_##T(a * c - b * s);                                                           \
      out[i + pairs] = store_##T(b * c + a * s);                                                   \
    }                                                                                              \
  }                                                                                                \
  static inline void interleaved_##T(const T *restrict x, T *restrict out,                         \
                                     const float *restrict cos, const float *restrict sin,         \
                                     int64_t pairs) {                                              \
    for (int64_t i = 0; i < pairs; i++) {                                                          \
      float a = load_##T(x[2 * i]), b = load_##T(x[2 * i + 1]), c = cos[i], s = sin[i];            \
      out[2 * i] = store_##T(a * c - b * s);                                                       \
      out[2 * i + 1] = store_##T(b * c + a * s);                                                   \
    }                                                                                              \
  }                                                                                                \
  void rotate_##T(const T *x, T *out, const float *cos, const float *sin, const Shape *of,         \
                  int64_t first, int64_t last) {                                                   \
    int64_t pairs = of->pairs, tiles = (of->length + of->tile - 1) / of->tile;                     \
    int64_t size = (2 * of->pairs + of->rest) * sizeof(T), rows = (AHEAD + size - 1) / size;       \
    int64_t x_ahead = rows * (of->tile > 1 ? of->x_token : of->x_head);                            \
    int64_t out_ahead = rows * (of->tile > 1 ? of->out_token : of->out_head);                      \
    for (int64_t i = first; i < last; i++) {                                                       \
      int64_t batch = i / tiles, start = i % tiles * of->tile;                                     \
      int64_t stop = start + of->tile < of->length ? start + of->tile : of->length;                \
      for (int64_t head = 0; head < of->heads; head++)                                             \
        for (int64_t token = start; token < stop; token++) {                                       \
          const T *from = x + batch * of->x_batch + head * of->x_head + token * of->x_token;       \
          T *to = out + batch * of->out_batch + head * of->out_head + token * of->out_token;       \
          int64_t table = batch * of->table_batch + token * of->pairs;                             \
          fetch((const char *)(from + x_ahead), (char *)(to + out_ahead), size);                   \
          if (of->interleaved)                                                                     \
            BY_PAIRS(interleaved_##T, from, to, cos + table, sin + table);                         \
          else                                                                                     \
            BY_PAIRS(split_##T, from, to, cos + table, sin + table);                               \
          if (of->rest)                                                                            \
            memcpy(to + 2 * of->pairs, from + 2 * of->pairs, of->rest * sizeof(T));                \
        }                                                                                          \
    }                                                                                              \
  }

ROTATE(f32)
ROTATE(bf16)
