// Sums split-K partials: y[i] = sum over s of p[s][i], s ascending, in fp32. One thread per output.

//! kernel qmv_reduce (p) -> (y)
const uint n = p_shape[1], i = thread_position_in_grid.x;
if (i < n) {
  float t = p[i];
  for (int s = 1; s < SPLITS; s++) t += p[(size_t)s * n + i];
  y[i] = T(t);
}
