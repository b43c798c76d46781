/* What CoPE and FIRE add to rows of float32 scores, in one read and one write. Called by
   in_place.py. */

#include <stdint.h>
#include <string.h>

#define TILE 64 /* keys that are done together */
#define LANES 16
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float)))); /* sums in registers */
#define AT_TILE for (int64_t j = 0; j < TILE; j++)

/* 1 / (1 + e^-x) within 3e-7; NaN stays NaN. */
static inline float sigmoid(float x) {
  float y = x < -87.f ? 87.f : x > 87.f ? -87.f : -x;
  float turns = y * 1.44269504f + (y < 0 ? -.5f : .5f), power;
  int32_t whole = (int32_t)(turns == turns ? turns : 0), bits = (whole + 127) << 23;
  float r = y - whole * 0.693359375f + whole * 2.12194440e-4f, p = 1 / 120.f + r * (1 / 720.f);
  p = 1 + r * (1 + r * (1 / 2.f + r * (1 / 6.f + r * (1 / 24.f + r * p))));
  memcpy(&power, &bits, sizeof power);
  return 1 / (1 + p * power);
}

/* `table` has `positions` numbers for each row; strides of visible are those of batch, head and
   row. */
typedef struct {
  float *scores;
  const float *gates, *table;
  const uint8_t *visible;
  int64_t stride[3], positions, heads, rows, keys;
} Gates;

/* From the last key to the first: count the gates of the visible keys and add what `table` says at
   that count. Rows first..last of (batch, heads, rows, keys) in one piece; `visible`, if there is
   one, has its keys side by side. */
int count_gates(const Gates *of, int64_t first, int64_t last) {
  const uint8_t *visible = of->visible;
  const int64_t *stride = of->stride;
  int64_t positions = of->positions, heads = of->heads, rows = of->rows, keys = of->keys;
  const float most = positions - 1;
  for (int64_t n = first; n < last; n++) {
    float *s = of->scores + n * keys, count = 0, open[TILE];
    const float *g = of->gates + n * keys, *t = of->table + n * positions;
    const uint8_t *see = visible + n / rows / heads * stride[0] + n / rows % heads * stride[1] +
                         n % rows * stride[2];
    int64_t stop = keys;
    for (; stop > 0 && !(count >= most); stop -= TILE) {
      int64_t start = stop < TILE ? 0 : stop - TILE, width = stop - start;
      for (int64_t j = 0; j < width; j++) open[j] = sigmoid(g[start + j]);
      if (visible)
        for (int64_t j = 0; j < width; j++) open[j] = see[start + j] ? open[j] : 0;
      for (int64_t j = width - 1; j >= 0; j--) {
        count += open[j];
        float at = count < most ? count : most; /* NaN counts as the last: its score is NaN */
        int64_t below = (int64_t)at;
        float low = t[below], high = t[below + (below < positions - 1)];
        s[start + j] += low + (at - below) * (high - low);
      }
    }
    for (int64_t j = 0; j < stop; j++) s[j] += t[positions - 1];
  }
  return 0;
}

/* `shares` is 1 where all of the batch have one share. */
typedef struct {
  float *scores;
  const float *share, *weight, *limit, *out, *base;
  int64_t units, shares, heads, rows, keys;
} Network;

/* scores[b, h, i, j] += sum over u of out[h, u] max(weight[u] share[b, i, j], limit[u]) + base[h],
   for rows first..last of (batch, rows). */
int add_network(const Network *of, int64_t first, int64_t last) {
  const float *weight = of->weight, *limit = of->limit, *out = of->out;
  int64_t units = of->units, heads = of->heads, rows = of->rows, keys = of->keys;
  float hidden[units][TILE], x[TILE] = {0};
  for (int64_t n = first; n < last; n++)
    for (int64_t start = 0; start < keys; start += TILE) {
      int64_t b = n / rows, i = n % rows, width = keys - start < TILE ? keys - start : TILE;
      memcpy(x, of->share + ((of->shares == 1 ? 0 : b) * rows + i) * keys + start, width * sizeof *x);
      for (int64_t u = 0; u < units; u++)
        AT_TILE {
          float value = weight[u] * x[j];
          hidden[u][j] = value < limit[u] ? limit[u] : value; /* NaN stays NaN */
        }
      for (int64_t h = 0; h < heads; h++) {
        Lanes sum[TILE / LANES], each;
        for (int k = 0; k < TILE / LANES; k++) sum[k] = (Lanes){0} + of->base[h];
        for (int64_t u = 0; u < units; u++)
          for (int k = 0; k < TILE / LANES; k++) {
            memcpy(&each, hidden[u] + k * LANES, sizeof each);
            sum[k] += out[h * units + u] * each;
          }
        float *s = of->scores + ((b * heads + h) * rows + i) * keys + start, *added = (float *)sum;
        for (int64_t j = 0; j < width; j++) s[j] += added[j];
      }
    }
  return 0;
}
