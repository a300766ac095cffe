// Decode attention, matrix variant: a simdgroup takes 16 MANY keys at once for R = 8 NB query rows.
// Scores are K Q^T and the output O^T += V^T P^T: keys and elements of V are the rows of the first operand
// and come straight from memory or through a ring, query rows are the columns of the second. What a column gets does
// not depend on the other columns, on R or on W: a row has the same bits whatever q_len is.
//
// Codes are multiplied as they are. A group of a key of K gives scale * sum(c q) + bias * sum(q); a
// group of V takes p * scale in the place of p, and sum(p * bias) is added at the end. What a half
// has in front of a code is taken out through sums of the other operand.

template <typename T, int D, int DV, int KBITS, int KG, int VBITS, int VG, int R, int KP, int W,
          int CHUNK, int MANY, int MASK, bool SINKS, bool DIRECT>
struct SdpaMatrix {
  static constexpr constant int KB = KBITS < 16 ? KBITS : 8 * sizeof(T), VB = VBITS < 16 ? VBITS : 8 * sizeof(T);
  // Bits of the codes, if there are any.
  static constexpr constant int KC = KBITS < 16 ? KBITS : 8, VC = VBITS < 16 ? VBITS : 8;
  static constexpr constant int NB = R / 8;
  // Tiles of 16 keys between two updates of the softmax.
  static constexpr constant int UK = CHUNK % (16 * MANY * KP) == 0 ? MANY : 1, STEP = 16 * UK * KP;

  // Codes come through a ring where threadgroup memory holds three slots of it next to what a merge of R = 16 needs.
  static constexpr constant int WORDS = D * KB > DV * VB ? D * KB / 32 : DV * VB / 32;
  static constexpr constant int NG = D / KG > DV / VG ? D / KG : DV / VG, SLOT = 16 * UK * (WORDS + NG);
  static constexpr constant bool RING = KBITS < 16 && VBITS < 16 && sizeof(T) == 2 && 3 * KP * SLOT + KP * 224 <= 8192 &&
      D * KB % 256 == 0 && DV * VB % 256 == 0 && D / KG % 2 == 0 && DV / VG % 2 == 0;
  static constexpr constant int ST = 5 * KP * W * SLOT + KP * W * R * 14 <= 8192 ? 5 : 3, SLOTS = RING ? KP * W * ST * SLOT : 0;

  typedef Rows<T, KB, KG, D, 4, RING> K;
  typedef Rows<T, VB, VG, DV, 8, RING> V;
  typedef Ring<T, K, V, UK, ST> Steps;
  typedef typename K::Operand KT;
  typedef typename V::Operand VT;
  typedef Parts<DV, R, KP, W, V::RUN, RING ? DV / 16 : V::U, 8192 - SLOTS, SINKS, DIRECT> Merge;

  // The first key of a simdgroup in a chunk, of which it takes 16 UK every STEP. A window leaves out whole
  // steps, so that steps begin at the same keys for every row.
  static METAL_FUNC int first_key(const thread Place& at, const int chunk) {
    const int c0 = chunk * CHUNK;
    return c0 + (at.window ? max(0, at.len - at.q_len - at.window + 1 - c0) / STEP * STEP : 0) + at.sg % KP * 16 * UK;
  }

  // The first chunk from `chunk` on that has keys for a row; those before are marked as empty.
  static METAL_FUNC int skip(const thread Place& at, int chunk, const int stride, const int row0, device float* ml) {
    for (; !DIRECT && chunk < at.chunks; chunk += stride) {
      if (first_key(at, chunk) - at.sg % KP * 16 * UK < min(at.len, (chunk + 1) * CHUNK)) break;
      const int n = row0 + at.sg % KP * 32 + at.lane;
      if (n < min(at.G * at.q_len, row0 + R)) {
        const size_t c = state_at(at, n) - at.chunk + chunk;
        ml[2 * c] = -INFINITY;
        ml[2 * c + 1] = 0;
      }
    }
    return chunk;
  }

  // The lane's two keys of each tile of a step that begins at `key`.
  static METAL_FUNC void load_keys(
      const thread K& k, const int key, const thread Place& at, const bool wide, thread uint* w, thread uint* sb) {
    EACH(h, 2 * UK) {
      const int mine = min(key + 8 * h + TILE_ROW(at.lane), at.len - 1);
      k.load(mine, TILE_COL(at.lane), wide, w + h * K::N * K::NW);
      k.load_sb(mine, wide, sb + h * 2 * K::NS);
    }
  }

  // Its four keys of the values of the step.
  static METAL_FUNC void load_values(
      const thread V& v, const int key, const thread Place& at, const bool wide, thread uint* w, thread uint* sb) {
    EACH(i, 4 * UK)
      v.load(min(key + i / 2 * 8 + 2 * TILE_COL(at.lane) + i % 2, at.len - 1), TILE_ROW(at.lane), wide, w + i * V::N * V::NW);
    EACH(h, 2 * UK) v.load_sb(min(key + 8 * h + TILE_ROW(at.lane), at.len - 1), wide, sb + h * 2 * V::NS);
  }

  // The step of a simdgroup that is copied next: it begins at `key`, and those of its chunk end at `stop`.
  struct Ahead { int chunk, key, stop; };
  static METAL_FUNC void copy_keys(
      const thread Steps& steps, const thread K& k, threadgroup uint* slot, thread Ahead& a, const thread Place& at, const int stride) {
    while (a.key >= a.stop && a.chunk * CHUNK < at.len) {
      a.chunk += stride;
      a.key = first_key(at, a.chunk);
      a.stop = min(at.len, (a.chunk + 1) * CHUNK);
    }
    if (a.key < a.stop) steps.copy(k, slot, a.key);
    COPIES_END();
  }
  static METAL_FUNC void copy_values(const thread Steps& steps, const thread V& v, threadgroup uint* slot, thread Ahead& a) {
    if (a.key < a.stop) steps.copy(v, slot, a.key);
    a.key += STEP;
    COPIES_END();
  }

  // The chunks at.chunk, at.chunk + stride, ... of a threadgroup. o: [NB][DV / 16][4] as mma16 leaves
  // it, top (times log2(e)) and sum: [NB][2]. With codes of V, top is not the largest score but that of
  // the largest scale times weight: what sums are relative to.
  template <typename Mask, typename S, typename O>
  static METAL_FUNC void run(
      const device T* q, const uint3 q_steps, const float q_scale, const thread K& k, const thread V& v,
      const bool wide, const Mask mask, const int4 mask_steps, const S sinks, device O* out, device float* ml,
      threadgroup float* part, threadgroup float* state, threadgroup uint4* ring, const thread Place& at, const int stride) {
    const float scale = q_scale * LOG2E;
    const int row = TILE_ROW(at.lane), col = TILE_COL(at.lane), row0 = (at.block + at.sg / KP) * R;
    const uint one = one_bits(at.q_len);
    // Minus what stands in front of the middle code of even and of odd elements of V.
    const float MIDDLE = 1 << (VC - 1);
    const PAIR(VT) first = pair_of<VT>(-offset<T>() - MIDDLE, -offset<T>() - MIDDLE);
    const float odd = -offset<T>() - MIDDLE / unscale<VC>(1);
    const PAIR(VT) second = pair_of<VT>(odd, odd);
    uint kw[2 * UK * K::N * K::NW], vw[4 * UK * V::N * V::NW + 1], ks[4 * UK * K::NS], vs[4 * UK * V::NS];
    // Keys behind the last are the last again: nothing behind it is read, and they have no weight.
    int chunk = skip(at, at.chunk, stride, row0, ml);
    const int here = first_key(at, chunk);
    const Steps steps = {at.len, at.lane, wide};
    threadgroup uint* slots = (threadgroup uint*)ring + at.sg * (ST * SLOT);
    Ahead ahead = {chunk, here, min(at.len, (chunk + 1) * CHUNK)};
    int slot = 0;
    if (RING) EACH(i, ST / 2) {
      copy_keys(steps, k, slots + 2 * i * SLOT, ahead, at, stride);
      copy_values(steps, v, slots + (2 * i + 1) * SLOT, ahead);
    }
    else if (chunk * CHUNK < at.len) {
      load_keys(k, here, at, wide, kw, ks);
      load_values(v, here, at, wide, vw, vs);
    }
    // The lane's two columns of each tile, and q in the order in which keys are held.
    Row c[NB * 2];
    PAIR(KT) qs[NB * D / 8];
    PAIR(VT) p[NB * 2 * UK];
    // Of a column with codes of K: the power of two that was taken out of q times scale, and of each
    // group -offset * sum(q * unscale), and sum(q).
    float scales[NB * 2], start[NB * K::NG * 2], sums[NB * K::NG * 2];
    size_t seen[NB * 2];
    EACH(i, NB * 2) {
      c[i] = row_at(at, row0 + i / 2 * 8 + 2 * col + i % 2);
      c[i].to = max(c[i].to, c[i].from);
      seen[i] = at.b * (size_t)mask_steps.x + (at.head + c[i].head) * (size_t)mask_steps.y + c[i].i * (size_t)mask_steps.z;
    }
    q += at.b * q_steps.x + at.head * q_steps.y;
    EACH(n, NB) {
      const Row m = row_at(at, row0 + n * 8 + row);
      const device T* own = q + m.head * q_steps.y + m.i * q_steps.z + col * K::RUN;
      const device T* x = q + c[2 * n].head * q_steps.y + c[2 * n].i * q_steps.z + row / 2 * K::RUN;
      const device T* y = q + c[2 * n + 1].head * q_steps.y + c[2 * n + 1].i * q_steps.z + row / 2 * K::RUN;
      float v[K::N * K::RUN], fx = 1, fy = 1, mine = 1;
      if (K::CODED) {
        // A power of two brings the largest of a row between 1 and 2, so that halves hold it.
        float big = 0;
        EACH(i, D / 4 / K::U) {
          const device T* from = own + i * K::U / K::RUN * 4 * K::RUN + i * K::U % K::RUN;
          if (K::U < 8) EACH(j, K::U) v[K::U * i + j] = float(from[j]);
          else if (wide) load8<T, true>(from, v + 8 * i);
          else load8<T, false>(from, v + 8 * i);
        }
        EACH(i, D / 4) big = max(big, fabs(v[i]));
        big = max(big, simd_shuffle_xor(big, 1));
        big = max(big, simd_shuffle_xor(big, TILE_SIDE));
        const uint power = clamp(as_type<uint>(big) >> 23, 1u, 253u) << 23, inverse = 254u << 23;
        const uint px = simd_shuffle(power, TILE_LANE(2 * col)), py = simd_shuffle(power, TILE_LANE(2 * col + 1));
        mine = as_type<float>(inverse - power);
        fx = as_type<float>(inverse - px);
        fy = as_type<float>(inverse - py);
        scales[2 * n] = as_type<float>(px) * scale;
        scales[2 * n + 1] = as_type<float>(py) * scale;
      }
      EACH(i, K::N) {
        const int at_run = i * 4 * K::RUN;
        thread PAIR(KT)* to = qs + (n * K::N + i) * (K::RUN / 2);
        if (K::CODED) code_columns<KT, KC, K::RUN>(v + i * K::RUN, x + at_run, y + at_run, mine, fx, fy, row, to);
        else if (wide) load_columns<KT, KB, K::RUN, true>(own + at_run, x + at_run, y + at_run, row, to);
        else load_columns<KT, KB, K::RUN, false>(own + at_run, x + at_run, y + at_run, row, to);
      }
      if (K::CODED) {
        const PAIR(KT) ones = pair_of<KT>(1.0f, 1.0f), back = pair_of<KT>(1 / unscale<KC>(1), 1 / unscale<KC>(1));
        EACH(g, K::NG) {
          float t[4] = {0, 0, 0, 0};
          const thread PAIR(KT)* b = qs + n * (D / 8) + g * (KG / 8);
          EACH(i, KG / 16) mma16<KT>(t, ones, ones, ones, back, b[2 * i], b[2 * i + 1]);
          EACH(i, 2) {
            start[(n * K::NG + g) * 2 + i] = -offset<T>() * t[i];
            sums[(n * K::NG + g) * 2 + i] = t[2 + i];
          }
        }
      }
    }
    for (bool again = false; chunk * CHUNK < at.len || (DIRECT && !again); chunk += stride, again = true) {
      const int end = min(at.len, (chunk + 1) * CHUNK), begin = first_key(at, chunk);
      const int next = (chunk + stride) * CHUNK < at.len ? first_key(at, chunk + stride) : at.len;
      float o[NB * DV / 4], top[NB * 2], sum[NB * 2], bias[NB * V::NG * 2];
      EACH(i, NB * 2) top[i] = LOWEST;
      EACH(i, NB * 2) sum[i] = 0;
      EACH(i, NB * DV / 4) o[i] = 0;
      EACH(i, NB * V::NG * 2) bias[i] = 0;
      for (int key = begin; key < end; key += STEP) {
        // Plain: two sums of every other 16 elements each, for shorter chains of dependent multiplies.
        // Codes: one of each group, the other is the score.
        const int two = slot + 1 == ST ? 0 : slot + 1;
        if (RING) {
          // The slot of the values before is free now in all lanes.
          COPIES_WAIT(ST - 2);
          simdgroup_barrier(mem_flags::mem_threadgroup);
          steps.template words<K, false>(slots + slot * SLOT, kw);
          steps.template scales<K>(slots + slot * SLOT, ks);
          copy_keys(steps, k, slots + (slot ? slot - 1 : ST - 1) * SLOT, ahead, at, stride);
        }
        float s[NB * UK * 8];
        EACH(i, NB * UK * 8) s[i] = 0;
        EACH(z, D / 4 / K::U * UK) {
          const int t = z % UK, u = z / UK, r = u * K::U / K::RUN, j = u % (K::RUN / K::U), g = r / K::PER;
          const thread uint* w = kw + (2 * t * K::N + r) * K::NW;
          thread float* mine = s + t * NB * 8;
          PAIR(KT) a[K::U];
          if (K::CODED) {
            codes_along<T, KC, K::U, KT>(w, j, one, a);
            codes_along<T, KC, K::U, KT>(w + K::N * K::NW, j, one, a + K::U / 2);
            if (u * K::U * 4 % KG == 0) {
              EACH(i, NB * 4) mine[i / 4 * 8 + 4 + i % 4] = start[(i / 4 * K::NG + g) * 2 + i % 2];
            }
          } else {
            plain_along<KT, K::U>(w, j, a);
            plain_along<KT, K::U>(w + K::N * K::NW, j, a + K::U / 2);
          }
          EACH(i, K::U / 4) {
            const int x = u * (K::U / 4) + i;
            EACH(n, NB)
              mma16<KT>(mine + n * 8 + (K::CODED ? 1 : x % 2) * 4, a[2 * i], a[K::U / 2 + 2 * i], a[2 * i + 1],
                        a[K::U / 2 + 2 * i + 1], qs[n * (D / 8) + 2 * x], qs[n * (D / 8) + 2 * x + 1]);
          }
          if (K::CODED && (u + 1) * K::U * 4 % KG == 0) {
            EACH(i, NB * 4) {
              const thread uint* sb = ks + (2 * t + i % 4 / 2) * 2 * K::NS;
              thread float* x = mine + i / 4 * 8 + i % 4;
              *x = fma(scale_at<T>(sb, g), x[4], fma(scale_at<T>(sb + K::NS, g), sums[(i / 4 * K::NG + g) * 2 + i % 2], *x));
            }
          }
        }
        // The next keys are on their way while these are weighted.
        const int after = key + STEP < end ? key + STEP : next;
        if (!RING && after < at.len) load_keys(k, after, at, wide, kw, ks);
        if (RING) {
          COPIES_WAIT(ST - 2);
          simdgroup_barrier(mem_flags::mem_threadgroup);
          steps.template scales<V>(slots + two * SLOT, vs);
          copy_values(steps, v, slots + slot * SLOT, ahead);
        }
        // A weight times its largest scale of V, not the weight itself, is at most about 2^15, for a half.
        // The bits of a float are close to its logarithm, in steps of 2^-23 from -127 on.
        float size[2 * UK], f[NB * 2];
        EACH(h, 2 * UK) {
          size[h] = 0;
          if (!V::CODED || sizeof(T) != 2) continue;
          float most = fabs(scale_at<T>(vs + h * 2 * V::NS, 0));
          UNROLL for (int g = 1; g < V::NG; g++) most = max(most, fabs(scale_at<T>(vs + h * 2 * V::NS, g)));
          size[h] = max(fma(float(as_type<int>(most)), 1.1920929e-7f, -142.0f), -55.0f);
        }
        EACH(n, NB) {
          EACH(i, 4 * UK) {
            const Row m = c[2 * n + i % 2];
            const int j = key + i / 2 * 8 + row;
            thread float* x = s + (i / 4 * NB + n) * 8 + i % 4;
            *x = K::CODED ? *x * scales[2 * n + i % 2] : (x[0] + x[4]) * scale;
            if (uint(j - m.from) >= uint(m.to - m.from)) *x = -INFINITY;
            else if (MASK)
              *x = fma(added(mask[seen[2 * n + i % 2] + (size_t)j * mask_steps.w]), LOG2E, *x);
          }
          EACH(i, 2) {
            const int e = 2 * n + i;
            float high = -INFINITY, all = 0;
            EACH(h, 2 * UK) {
              const float x = s[(h / 2 * NB + n) * 8 + h % 2 * 2 + i];
              high = max(high, V::CODED ? x + size[h] : x);
            }
            high = max(top[e], rows_max(high));
            f[e] = EXP2(top[e] - high);
            top[e] = high;
            EACH(h, 2 * UK) {
              thread float* x = s + (h / 2 * NB + n) * 8 + h % 2 * 2 + i;
              *x = EXP2(*x - high);
              all += *x;
            }
            sum[e] = fma(sum[e], f[e], all);
          }
        }
        float m[NB * 4];
        EACH(i, NB * 4) m[i] = 0;
        if (RING) {
          steps.template words<V, true>(slots + two * SLOT, vw);
          slot = two + 1 == ST ? 0 : two + 1;
        }
        EACH(u, DV / 8 / V::U) {
          const int r = u * V::U / V::RUN, j = u % (V::RUN / V::U), g = r / V::PER, L = V::N * V::NW;
          if (u == 0 || (V::CODED && u * V::U * 8 % VG == 0)) {
            EACH(i, NB * 4) m[i] = 0;
            EACH(t, UK) {
              float2 w[2] = {1, 1};
              EACH(h, 2 * V::CODED) {
                const thread uint* sb = vs + (2 * t + h) * 2 * V::NS;
                w[h] = float2(scale_at<T>(sb, g), scale_at<T>(sb + V::NS, g));
              }
              EACH(n, NB) {
                const thread float* x = s + (t * NB + n) * 8;
                thread PAIR(VT)* to = p + (t * NB + n) * 2;
                EACH(h, 2) to[h] = to_b<VT>(pair_of<VT>(x[2 * h] * w[h].x, x[2 * h + 1] * w[h].x));
                if (!V::CODED) continue;
                // Codes count from their middle, and its share is a bias: fewer digits of p are lost.
                thread float* b = bias + (n * V::NG + g) * 2;
                EACH(i, 2)
                  b[i] = fma(b[i], t ? 1.0f : f[2 * n + i],
                             fma(x[i], fma(w[0].x, MIDDLE, w[0].y), x[2 + i] * fma(w[1].x, MIDDLE, w[1].y)));
                mma16<VT>(m + n * 4, first, second, first, second, to[0], to[1]);
              }
            }
          }
          EACH(n, NB * V::U * 2) {
            thread float* x = o + n / (V::U * 2) * (DV / 4) + u * V::U * 2 + n % (V::U * 2);
            *x = fma(*x, f[n / (V::U * 2) * 2 + n % 2], m[n / (V::U * 2) * 4 + n % 4]);
          }
          EACH(t, UK) {
            PAIR(VT) a[2 * V::U];
            EACH(h, 2) {
              const thread uint* w = vw + (4 * t + 2 * h) * L + r * V::NW;
              if (RING) codes_of_pair<T, VC, VT>(vw[(2 * t + h) * V::N + r], one, a + h * V::U);
              else if (V::CODED) codes_across<T, VC, V::U, VT>(w, w + L, j, one, a + h * V::U);
              else across<VT, V::U>(w, w + L, j, a + h * V::U);
            }
            EACH(n, NB) {
              const thread PAIR(VT)* with = p + (t * NB + n) * 2;
              EACH(i, V::U / 2)
                mma16<VT>(o + n * (DV / 4) + u * V::U * 2 + 4 * i, a[2 * i], a[2 * i + 1], a[V::U + 2 * i],
                          a[V::U + 2 * i + 1], with[0], with[1]);
            }
          }
        }
        if (!RING && after < at.len) load_values(v, after, at, wide, vw, vs);
      }
      if (V::CODED) {
        EACH(i, NB * V::NG * 2) bias[i] = rows_sum(bias[i]);
        EACH(i, NB * DV / 4) {
          const int n = i / (DV / 4), g = i % (DV / 4) * 4 / VG;
          o[i] = fma(o[i], unscale<VC>(i / 2 % 2), bias[(n * V::NG + g) * 2 + i % 2]);
        }
      }
      EACH(i, NB * 2) sum[i] = rows_sum(sum[i]);
      if (again) threadgroup_barrier(mem_flags::mem_threadgroup);
      Merge::store(o, top, sum, part, state, sinks, out, ml, at, chunk);
    }
    skip(at, chunk, stride, row0, ml);
  }
};

//! kernel sdpa_matrix (q, k, v, mask, sinks, lens, numbers) -> (out, ml)
typedef SdpaMatrix<T, D, DV, 16, 64, 16, 64, R, KP, W, CHUNK, U / 16, MASK, SINKS, DIRECT> X;
threadgroup float part[KP * W * R * X::Merge::P];
threadgroup float state[KP * W * R * 2];
threadgroup uint4 ring[X::RING ? X::SLOTS / 4 : 1];
const Place at = place<CHUNK, W, WINDOW>(
    q_shape, k_shape, LENS ? int(lens[threadgroup_position_in_grid.z / k_shape[1]]) : k_shape[2], numbers,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const typename X::K kr = {
    (const device uchar*)(k + at.b * k_strides[0] + at.kv * k_strides[1]), nullptr, nullptr, uint(k_strides[2] * sizeof(k[0])), 0, 0};
const typename X::V vr = {
    (const device uchar*)(v + at.b * v_strides[0] + at.kv * v_strides[1]), nullptr, nullptr, uint(v_strides[2] * sizeof(v[0])), 0, 0};
// Rows are read along the last axis; a layout that has it elsewhere gets NaN, never a wrong number.
const bool rows = q_strides[3] == 1 && k_strides[3] == 1 && v_strides[3] == 1;
X::run(
    q, uint3(q_strides[0], q_strides[1], q_strides[2]), rows ? numbers[0] : NAN, kr, vr,
    even(q, q_strides) && even(k, k_strides) && even(v, v_strides), mask, MASK ? mask_steps(mask_shape, mask_strides) : int4(0),
    sinks, out, ml, part, state, ring, at, threadgroups_per_grid.y);

//! kernel sdpa_matrix_codes (q, k, ks, kb, v, vs, vb, mask, sinks, lens, numbers) -> (out, ml)
typedef SdpaMatrix<T, D, DV, KB, KG, VB, VG, R, KP, W, CHUNK, U / 16, MASK, SINKS, DIRECT> X;
threadgroup float part[KP * W * R * X::Merge::P];
threadgroup float state[KP * W * R * 2];
threadgroup uint4 ring[X::RING ? X::SLOTS / 4 : 1];
const Place at = place<CHUNK, W, WINDOW>(
    q_shape, k_shape, LENS ? int(lens[threadgroup_position_in_grid.z / k_shape[1]]) : k_shape[2], numbers,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const typename X::K kr = {
    (const device uchar*)(k + at.b * k_strides[0] + at.kv * k_strides[1]), (const device uchar*)(ks + at.b * ks_strides[0] + at.kv * ks_strides[1]),
    (const device uchar*)(kb + at.b * kb_strides[0] + at.kv * kb_strides[1]), uint(k_strides[2] * sizeof(k[0])), uint(ks_strides[2] * sizeof(T)), uint(kb_strides[2] * sizeof(T))};
const typename X::V vr = {
    (const device uchar*)(v + at.b * v_strides[0] + at.kv * v_strides[1]), (const device uchar*)(vs + at.b * vs_strides[0] + at.kv * vs_strides[1]),
    (const device uchar*)(vb + at.b * vb_strides[0] + at.kv * vb_strides[1]), uint(v_strides[2] * sizeof(v[0])), uint(vs_strides[2] * sizeof(T)), uint(vb_strides[2] * sizeof(T))};
const bool wide = even(q, q_strides) && even(k, k_strides) && even(v, v_strides) &&
    even_scales<typename X::K>(ks, ks_strides) && even_scales<typename X::K>(kb, kb_strides) &&
    even_scales<typename X::V>(vs, vs_strides) && even_scales<typename X::V>(vb, vb_strides);
// Rows are read along the last axis; a layout that has it elsewhere gets NaN, never a wrong number.
const bool rows = q_strides[3] == 1 && k_strides[3] == 1 && v_strides[3] == 1;
X::run(
    q, uint3(q_strides[0], q_strides[1], q_strides[2]), rows ? numbers[0] : NAN, kr, vr,
    wide, mask, MASK ? mask_steps(mask_shape, mask_strides) : int4(0),
    sinks, out, ml, part, state, ring, at, threadgroups_per_grid.y);
