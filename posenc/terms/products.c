/* Products of rows with vectors that belong to the distance, added to scores. Called by
   products.py. */

#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
enum { LANES = 16, ROWS = 8 }; /* sums that fit into the registers */
#else
enum { LANES = 8, ROWS = 4 };
#endif
enum { TILE = 3 * LANES, KEYS = 64 };
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

/* tile[r] = rows[r] . panel, which holds TILE numbers for each of `width`. */
static inline void multiply(float tile[ROWS][TILE], const float *const rows[ROWS],
                            const float *panel, int64_t width) {
  Lanes sum[ROWS][3] = {0}, each[3];
  for (int64_t d = 0; d < width; d++) {
    memcpy(each, panel + d * TILE, sizeof each);
    for (int r = 0; r < ROWS; r++)
      for (int k = 0; k < 3; k++) sum[r][k] += rows[r][d] * each[k];
  }
  memcpy(tile, sum, sizeof sum);
}

/* out[r][c] += a[r] . table[:, rows - 1 - r + c] for `rows` rows and `columns` columns; table
   holds, for each of `width`, a number for every distance, `distances` apart. */
static void add_skewed(float *out, int64_t stride, const float *a, int64_t rows, int64_t width,
                       const float *table, int64_t distances, int64_t columns) {
  float panel[width * TILE], tile[ROWS][TILE];
  for (int64_t begin = 0; begin < rows - 1 + columns; begin += TILE) {
    int64_t left = rows - 1 + columns - begin, filled = left < TILE ? left : TILE;
    for (int64_t d = 0; d < width; d++) {
      const float *from = table + d * distances + begin;
      if (filled == TILE)
        memcpy(panel + d * TILE, from, sizeof *panel * TILE);
      else
        for (int t = 0; t < TILE; t++) panel[d * TILE + t] = t < filled ? from[t] : 0;
    }
    for (int64_t row = 0; row < rows; row += ROWS) {
      int64_t count = rows - row < ROWS ? rows - row : ROWS, at = begin - (rows - 1 - row);
      if (at + count - 1 + TILE <= 0 || at >= columns) continue;
      const float *mine[ROWS];
      for (int r = 0; r < ROWS; r++) mine[r] = a + (row + (r < count ? r : 0)) * width;
      multiply(tile, mine, panel, width);
      for (int r = 0; r < count; r++, at++) {
        float *to = out + (row + r) * stride + at;
        if (at >= 0 && at + TILE <= columns) {
          Lanes there[3], sum[3];
          memcpy(there, to, sizeof there);
          memcpy(sum, tile[r], sizeof sum);
          for (int k = 0; k < 3; k++) there[k] += sum[k];
          memcpy(to, there, sizeof there);
        } else
          for (int t = 0; t < TILE; t++)
            if (at + t >= 0 && at + t < columns) to[t] += tile[r][t];
      }
    }
  }
}

/* Scores have `rows` rows of `keys`, `stride` numbers apart; vectors[n] begin `apart` numbers from
   each other; table is (heads, width, distances). */
typedef struct {
  float *scores;
  int64_t rows, keys, stride;
  const float *vectors;
  int64_t apart, width;
  const float *table;
  int64_t distances, heads;
} Products;

/* scores[n, i, j] += vectors[n, i] . table[n % heads, :, rows - 1 - i + j], n from first to last. */
int add_of_queries(const Products *of, int64_t first, int64_t last) {
  int64_t rows = of->rows, width = of->width;
  for (int64_t n = first; n < last; n++)
    add_skewed(of->scores + n * rows * of->stride, of->stride, of->vectors + n * of->apart, rows,
               width, of->table + n % of->heads * width * of->distances, of->distances, of->keys);
  return 0;
}

/* scores[n, i, j] += vectors[n, j] . table[n % heads, :, keys - 1 - j + i] */
int add_of_keys(const Products *of, int64_t first, int64_t last) {
  int64_t rows = of->rows, keys = of->keys, width = of->width, distances = of->distances;
  float turned[KEYS][KEYS];
  for (int64_t n = first; n < last; n++)
    for (int64_t key = 0; key < keys; key += KEYS)
      for (int64_t row = 0; row < rows; row += KEYS) {
        int64_t wide = keys - key < KEYS ? keys - key : KEYS;
        int64_t high = rows - row < KEYS ? rows - row : KEYS;
        memset(turned, 0, sizeof turned);
        add_skewed(turned[0], KEYS, of->vectors + n * of->apart + key * width, wide, width,
                   of->table + n % of->heads * width * distances + (keys - key - wide) + row,
                   distances, high);
        for (int64_t i = 0; i < high; i++) {
          float *s = of->scores + (n * rows + row + i) * of->stride + key;
          for (int64_t j = 0; j < wide; j++) s[j] += turned[j][i];
        }
      }
  return 0;
}
