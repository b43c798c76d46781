/* cos and sin of position * frequency at consecutive positions, from those of few: a position is
   first + step * i + j, cos(a + b) = cos a cos b - sin a sin b, sin(a + b) = sin a cos b +
   cos a sin b. Compiled by native.py; called by runs.py. */

#include <math.h>
#include <stdint.h>

/* Frequencies are turns in 64-bit fixed point, which wrap for free; `radians` to one unit. Cosines
   and sines, (count, pairs), are written at positions first, first + 1, ...; `unsure` marks
   positions. `room` is for 2 * (step + 1 + tiles + 1) rows, tiles = count / step, rounded up. */
typedef struct {
  const int64_t *turns;
  double *room;
  float *cos, *sin;
  uint8_t *unsure;
  int64_t pairs, first, count, step;
  double radians, factor;
} Run;

/* Cosines and sines of `pairs` angles a row. */
typedef struct {
  double *cos, *sin;
} Rows;

/* More than float64 loses here: of an angle below pi 1e-15, of which 13 are summed. */
#define SLACK 3e-14
/* More than a cosine or sine itself is off by, for its size. */
#define LAST_DIGITS 1e-15

static inline double angle(const Run *of, int64_t position, int64_t pair) {
  return (double)(int64_t)((uint64_t)position * (uint64_t)of->turns[pair]) * of->radians;
}

/* Row 0 is there; row i is as many steps further. Row `count` is used. */
static void walk(const Run *of, Rows rows, int64_t count, int64_t step) {
  int64_t pairs = of->pairs;
  double *c = rows.cos + count * pairs, *s = rows.sin + count * pairs;
  for (int64_t made = 1; made < count; made *= 2) {
    for (int64_t t = 0; t < pairs; t++) {
      c[t] = cos(angle(of, made * step, t));
      s[t] = sin(angle(of, made * step, t));
    }
    for (int64_t i = 0; i < made && made + i < count; i++)
      for (int64_t t = 0; t < pairs; t++) {
        int64_t from = i * pairs + t, to = from + made * pairs;
        rows.cos[to] = rows.cos[from] * c[t] - rows.sin[from] * s[t];
        rows.sin[to] = rows.sin[from] * c[t] + rows.cos[from] * s[t];
      }
  }
}

/* A row without sums; whether its last digits could round one of them otherwise. */
static int alone(const Run *of, int64_t position, float *to_cos, float *to_sin) {
  int apart = 0;
  for (int64_t t = 0; t < of->pairs; t++) {
    double c = cos(angle(of, position, t)) * of->factor;
    double s = sin(angle(of, position, t)) * of->factor;
    to_cos[t] = (float)c;
    to_sin[t] = (float)s;
    apart |= (float)(c * (1 - LAST_DIGITS)) != (float)(c * (1 + LAST_DIGITS));
    apart |= (float)(s * (1 - LAST_DIGITS)) != (float)(s * (1 + LAST_DIGITS));
  }
  return apart;
}

/* Computed in float64 and rounded once, as if each angle had its own sine; positions are unsure of
   which that is not certain. For one thread: `room` is filled first. */
int run(const Run *of, int64_t first, int64_t last) {
  int64_t pairs = of->pairs, step = of->step, tiles = (of->count + step - 1) / step;
  double slack = SLACK * fabs(of->factor);
  Rows coarse = {of->room, of->room + (tiles + 1) * pairs};
  Rows fine = {coarse.sin + (tiles + 1) * pairs, coarse.sin + (tiles + step + 2) * pairs};
  for (int64_t t = 0; t < pairs; t++) {
    coarse.cos[t] = cos(angle(of, of->first, t)) * of->factor;
    coarse.sin[t] = sin(angle(of, of->first, t)) * of->factor;
    fine.cos[t] = 1, fine.sin[t] = 0;
  }
  walk(of, coarse, tiles, step);
  walk(of, fine, step, 1);
  for (int64_t i = first; i < last; i++) {
    const double *cos_a = coarse.cos + i / step * pairs, *cos_b = fine.cos + i % step * pairs;
    const double *sin_a = coarse.sin + i / step * pairs, *sin_b = fine.sin + i % step * pairs;
    float *restrict cos_i = of->cos + i * pairs, *restrict sin_i = of->sin + i * pairs;
    int apart = 0;
    for (int64_t t = 0; t < pairs; t++) {
      double c = cos_a[t] * cos_b[t] - sin_a[t] * sin_b[t];
      double s = sin_a[t] * cos_b[t] + cos_a[t] * sin_b[t];
      cos_i[t] = (float)(c + slack); /* as c itself, where they are not apart */
      sin_i[t] = (float)(s + slack);
      apart |= (cos_i[t] != (float)(c - slack)) | (sin_i[t] != (float)(s - slack));
    }
    of->unsure[i] = apart && alone(of, of->first + i, cos_i, sin_i);
  }
  return 0;
}
