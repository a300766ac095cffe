// Activations of a gated MLP, by their number in launch/fused.py.
template <int ACT>
METAL_FUNC float activate(const float g) {
  if (ACT == 0) return g / (1.0f + exp(-g));
  if (ACT == 3) {
    // g Phi(g); erf is that of Abramowitz and Stegun 7.1.26, wrong by 1.5e-7 at most
    const float z = fabs(g) * 0.70710678f, t = 1.0f / fma(0.3275911f, z, 1.0f);
    const float p = fma(t, fma(t, fma(t, fma(t, 1.061405429f, -1.453152027f), 1.421413741f), -0.284496736f), 0.254829592f);
    const float h = 0.5f * t * p, e = exp(-z * z);
    return g * (g < 0.0f ? h * e : fma(-h, e, 1.0f));
  }
  // 0.5 g (1 + tanh z) = g / (1 + exp(-2 z)): tanh of a large z is NaN where math is fast
  return g / (1.0f + exp(-1.5957691216f * fma(0.044715f * g * g, g, g)));
}
