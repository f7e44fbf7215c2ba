"""Every layer of GPT-2 on the CPU, forward and backward, and AdamW: one function a pass, under llm.c's names.

These functions say what is right, and they are the engine of training on the CPU. Arguments stand outputs first, as
everywhere in this project, and arrays are C-contiguous: N = B*T rows of C channels, tokens int32. A function
computes in the precision of its arrays: float32 to train, float64 to have the truth. Where a loop carries a sum in a
variable, the sum is float64 in both; what is added to an array is rounded to the array's type each time. Results are
the same bits from run to run: no loop's sum depends on the number of threads.

Loops are Numba's (`njit`, rows or blocks of columns in parallel, the machine code cached on disk); the large matrix
products go through numpy to BLAS, and `matmul_forward_loops` and its neighbours are the same products in plain loops.
"""

import functools
import math

import numba
import numpy as np
from numba import njit, prange, types
from numba.extending import overload

# BLAS has threads of its own. OpenMP's spin after a loop, on the cores that BLAS then needs, and a step takes 1.6 times
# as long. Numba's workqueue sleeps (and serves one Python thread at a time, as here).
if numba.config.THREADING_LAYER == "default":
    numba.config.THREADING_LAYER = "workqueue"

# Sums may be reordered, so that they run in vector registers. Infinities and NaNs stay what IEEE says: they must show.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
njit_parallel = functools.partial(njit, parallel=True, cache=True, fastmath=FASTMATH, error_model="numpy")
njit_inlined = functools.partial(njit, cache=True, fastmath=FASTMATH, error_model="numpy")

EPS = 1e-5  # layernorm's
COLUMNS = 64  # columns a thread takes at a time where it walks down them: four cache lines of float32
ATTENTION_ROWS = 64  # queries attention takes at a time: their scores stay in the cache
GELU_SCALE = math.sqrt(2 / math.pi)


# ---------------------------------------------------------------------------------------------------------------------
# what several layers share: exp and the softmax of a row


def exp(x):
    """e^x inside the loops below: math.exp, or for float32 one that runs in vector registers, seven times as fast."""
    return math.exp(x)


real32 = np.float32
TAYLOR = tuple(real32(1 / math.factorial(i)) for i in range(7, -1, -1))  # enough for float32 where |r| <= log(2)/2
INVERSE_LOG2 = real32(1 / math.log(2))
LOG2_HIGH, LOG2_LOW = real32(355 / 512), real32(math.log(2) - 355 / 512)  # log(2) in two parts: k * LOG2_HIGH is exact
LOWEST, HIGHEST = real32(-87), real32(88)  # outside, 2^k would leave float32's exponent


@overload(exp, jit_options={"fastmath": {"contract"}})
def exp_overload(x):
    if x != types.float32:
        return lambda x: math.exp(x)

    def exp_float32(x):  # x = k log(2) + r: e^x is 2^k, put together from its bits, times the series of e^r; NaN has no k
        y = min(max(x, LOWEST), HIGHEST)
        k = np.floor(y * INVERSE_LOG2 + real32(0.5))
        r = y - k * LOG2_HIGH - k * LOG2_LOW
        series = TAYLOR[0]
        for i in range(1, 8):
            series = series * r + TAYLOR[i]
        return x if x != x else series * np.int32((np.int32(k) + 127) << 23).view(np.float32)

    return exp_float32


@njit_inlined
def softmax(x, scale):
    """In place: x (C,) = exp(scale * x) / sum(exp(scale * x)). Returns the log of that sum. scale > 0."""
    factor = x.dtype.type(scale)
    top = x[0]
    for c in range(x.size):
        top = max(top, x[c])
    total = 0.0
    for c in range(x.size):
        x[c] = exp(factor * (x[c] - top))
        total += x[c]
    norm = x.dtype.type(1 / total)
    for c in range(x.size):
        x[c] *= norm
    return math.log(total) + scale * top


# ---------------------------------------------------------------------------------------------------------------------
# encoder: token embedding plus position embedding


@njit_parallel
def encoder_forward(out, inp, wte, wpe):
    """out (B,T,C) = wte[inp] + wpe; inp int32 (B,T), wte (Vp,C), wpe (maxT,C) with maxT >= T."""
    B, T, C = out.shape
    for row in prange(B * T):
        b, t = row // T, row % T
        token = inp[b, t]
        for c in range(C):
            out[b, t, c] = wte[token, c] + wpe[t, c]


@njit_parallel
def encoder_backward(dwte, dwpe, dout, inp):
    """Adds dout (B,T,C) into the rows of dwte (Vp,C) and dwpe (maxT,C) that inp (B,T) took."""
    B, T, C = dout.shape
    for block in prange((C + COLUMNS - 1) // COLUMNS):  # a thread owns columns: a repeated token is no race
        for b in range(B):
            for t in range(T):
                token = inp[b, t]
                for c in range(block * COLUMNS, min((block + 1) * COLUMNS, C)):
                    dwte[token, c] += dout[b, t, c]
                    dwpe[t, c] += dout[b, t, c]


# ---------------------------------------------------------------------------------------------------------------------
# layernorm (Ba et al. 2016) and the residual stream


@njit_parallel
def layernorm_forward(out, mean, rstd, inp, weight, bias):
    """out (N,C) = (inp - mean) * rstd * weight + bias; mean and rstd = 1/sqrt(variance + 1e-5) (N,) of each row."""
    N, C = inp.shape
    for n in prange(N):
        m = 0.0
        for c in range(C):
            m += inp[n, c]
        m /= C
        v = 0.0
        for c in range(C):
            v += (inp[n, c] - m) ** 2
        mean[n] = m
        rstd[n] = 1.0 / math.sqrt(v / C + EPS)
        for c in range(C):
            out[n, c] = (inp[n, c] - mean[n]) * rstd[n] * weight[c] + bias[c]


@njit_parallel
def layernorm_backward(dinp, dweight, dbias, dout, inp, weight, mean, rstd):
    """Adds into dinp (N,C), dweight (C,) and dbias (C,); dout, inp (N,C), mean, rstd (N,) from the forward."""
    N, C = inp.shape
    for n in prange(N):
        dnorm_mean = 0.0
        dnorm_norm_mean = 0.0
        for c in range(C):
            dnorm = weight[c] * dout[n, c]
            dnorm_mean += dnorm
            dnorm_norm_mean += dnorm * (inp[n, c] - mean[n]) * rstd[n]
        dnorm_mean = dinp.dtype.type(dnorm_mean / C)
        dnorm_norm_mean = dinp.dtype.type(dnorm_norm_mean / C)
        for c in range(C):
            norm = (inp[n, c] - mean[n]) * rstd[n]
            dinp[n, c] += (weight[c] * dout[n, c] - dnorm_mean - norm * dnorm_norm_mean) * rstd[n]
    for block in prange((C + COLUMNS - 1) // COLUMNS):
        start, stop = block * COLUMNS, min((block + 1) * COLUMNS, C)
        dw, db = np.zeros(COLUMNS), np.zeros(COLUMNS)
        for n in range(N):
            for c in range(start, stop):
                dw[c - start] += dout[n, c] * (inp[n, c] - mean[n]) * rstd[n]
                db[c - start] += dout[n, c]
        for c in range(start, stop):
            dweight[c] += dw[c - start]
            dbias[c] += db[c - start]


@njit_parallel
def residual_forward(out, inp1, inp2):
    """out = inp1 + inp2, 1-D."""
    for i in prange(out.size):
        out[i] = inp1[i] + inp2[i]


def fused_residual_forward(residual, out, mean, rstd, inp1, inp2, weight, bias):
    """residual = inp1 + inp2; out = layernorm(residual), with its mean and rstd (N,); the others (N,C)."""
    residual_forward(residual.reshape(-1), inp1.reshape(-1), inp2.reshape(-1))
    layernorm_forward(out, mean, rstd, residual, weight, bias)


def fused_residual_backward(dresidual, dweight, dbias, dprojb, dout, residual, weight, mean, rstd):
    """Adds layernorm's backward into dresidual (N,C), dweight, dbias (C,); then dresidual's column sums to dprojb (C,).

    dresidual is the gradient of both addends, so its column sums are the bias gradient of the projection that made one.
    """
    layernorm_backward(dresidual, dweight, dbias, dout, residual, weight, mean, rstd)
    matmul_backward_bias(dprojb, dresidual)


# ---------------------------------------------------------------------------------------------------------------------
# gelu (Hendrycks and Gimpel 2016), the tanh form. 0.5 * (1 + tanh(u)) is the logistic function of 2u: one exp.


@njit_inlined
def gelu_gate(x):
    """0.5 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x^3))), in the type of x."""
    real = type(x)
    return real(1) / (real(1) + exp(-real(2 * GELU_SCALE) * (x + real(0.044715) * x * x * x)))


@njit_parallel
def gelu_forward(out, inp):
    """out = 0.5 * inp * (1 + tanh(sqrt(2/pi) * (inp + 0.044715 * inp^3))), 1-D."""
    for i in prange(out.size):
        out[i] = inp[i] * gelu_gate(inp[i])


@njit_parallel
def gelu_backward(dinp, inp, dout):
    """dinp = dout * gelu'(inp), 1-D; dinp is overwritten."""
    real = dinp.dtype.type
    for i in prange(dinp.size):
        x = inp[i]
        gate = gelu_gate(x)
        slope = real(2 * GELU_SCALE) * (real(1) + real(3 * 0.044715) * x * x)
        dinp[i] = dout[i] * (gate + x * gate * (real(1) - gate) * slope)


# ---------------------------------------------------------------------------------------------------------------------
# matmul: weights are (OC,C), so that a row of the weight makes a channel of the output


def matmul_forward(out, inp, weight, bias):
    """out (N,OC) = inp (N,C) @ weight (OC,C).T + bias (OC,), which may be None."""
    np.matmul(inp, weight.T, out=out)
    if bias is not None:
        add_to_rows(out, bias)


def matmul_backward_input(dinp, dout, weight):
    """dinp (N,C) = dout (N,OC) @ weight (OC,C); overwritten."""
    np.matmul(dout, weight, out=dinp)


def matmul_backward_weight(dweight, dout, inp, accumulate):
    """dweight (OC,C) = dout (N,OC).T @ inp (N,C), added to what was there if accumulate."""
    if accumulate:
        for o in range(0, len(dweight), 1024):  # bands, so that the product to add stays small
            dweight[o : o + 1024] += dout[:, o : o + 1024].T @ inp
    else:
        np.matmul(dout.T, inp, out=dweight)


@njit_parallel
def matmul_backward_bias(dbias, dout):
    """dbias (OC,) += the column sums of dout (N,OC)."""
    N, OC = dout.shape
    for block in prange((OC + COLUMNS - 1) // COLUMNS):
        start, stop = block * COLUMNS, min((block + 1) * COLUMNS, OC)
        db = np.zeros(COLUMNS)
        for n in range(N):
            for o in range(start, stop):
                db[o - start] += dout[n, o]
        for o in range(start, stop):
            dbias[o] += db[o - start]


@njit_parallel
def add_to_rows(out, bias):
    """out (N,OC) += bias (OC,)."""
    N, OC = out.shape
    for n in prange(N):
        for o in range(OC):
            out[n, o] += bias[o]


@njit_parallel
def matmul_forward_loops(out, inp, weight, bias):
    """matmul_forward as it reads; bias an array."""
    N, C = inp.shape
    for n in prange(N):
        for o in range(len(weight)):
            total = 0.0
            for c in range(C):
                total += inp[n, c] * weight[o, c]
            out[n, o] = total + bias[o]


@njit_parallel
def matmul_backward_input_loops(dinp, dout, weight):
    """matmul_backward_input as it reads."""
    N, C = dinp.shape
    for n in prange(N):
        dinp[n] = 0
        for o in range(len(weight)):
            for c in range(C):
                dinp[n, c] += dout[n, o] * weight[o, c]


@njit_parallel
def matmul_backward_weight_loops(dweight, dout, inp, accumulate):
    """matmul_backward_weight as it reads."""
    OC, C = dweight.shape
    for o in prange(OC):
        if not accumulate:
            dweight[o] = 0
        for n in range(len(inp)):
            for c in range(C):
                dweight[o, c] += dout[n, o] * inp[n, c]


def matmul_gelu_forward(out, pre, inp, weight, bias):
    """pre (N,OC) = inp (N,C) @ weight (OC,C).T + bias; out = gelu(pre)."""
    matmul_forward(pre, inp, weight, bias)
    gelu_forward(out.reshape(-1), pre.reshape(-1))


def matmul_residual_forward(out, inp, weight, bias, residual):
    """out (N,OC) = residual (N,OC) + inp (N,C) @ weight (OC,C).T + bias (OC,)."""
    matmul_forward(out, inp, weight, bias)
    residual_forward(out.reshape(-1), residual.reshape(-1), out.reshape(-1))


def matmul_gelu_backward_input(dinp, dout, weight, pre):
    """dinp (N,C) = (dout (N,OC) @ weight (OC,C)) * gelu'(pre), with pre (N,C) what gelu's input was."""
    matmul_backward_input(dinp, dout, weight)
    gelu_backward(dinp.reshape(-1), pre.reshape(-1), dinp.reshape(-1))


# ---------------------------------------------------------------------------------------------------------------------
# attention (Vaswani et al. 2017): out = softmax(q k^T / sqrt(hs), causal) v in each of NH heads of hs = C/NH channels.
# A band of queries at a time against the keys up to its last, so that (T,T) scores are never held. The backward
# recomputes the probabilities from the log-sum-exp lse of each row, as FlashAttention does (Dao et al. 2022).


def heads(x, parts, NH):
    """The views (B,NH,T,hs) of the parts of x (B,T,parts*C): q, k and v of qkv, or the one of out."""
    B, T, C = x.shape
    return np.moveaxis(x.reshape(B, T, parts, NH, C // parts // NH), (2, 3), (0, 2))


def attention_forward(out, lse, qkv, NH):
    """out (B,T,C); lse (B,NH,T), the natural log of the sum of exp of a row's scaled scores; qkv (B,T,3C): q, k, v."""
    B, T, C = out.shape
    scale = 1 / math.sqrt(C // NH)
    for b in range(B):
        q, k, v = np.ascontiguousarray(heads(qkv, 3, NH)[:, b])
        o = heads(out, 1, NH)[0, b]
        for start in range(0, T, ATTENTION_ROWS):
            stop = min(start + ATTENTION_ROWS, T)
            att = q[:, start:stop] @ k[:, :stop].swapaxes(1, 2)
            attention_softmax(att, lse[b], start, scale)
            o[:, start:stop] = att @ v[:, :stop]


@njit_parallel
def attention_softmax(att, lse, start, scale):
    """In place: the scores q.k (NH,rows,columns) of queries start, start + 1, ... become probabilities; lse (NH,T)."""
    NH, rows, columns = att.shape
    for row in prange(NH * rows):
        h, r = row // rows, row % rows
        seen = start + r + 1
        lse[h, start + r] = softmax(att[h, r, :seen], scale)
        att[h, r, seen:] = 0


def attention_backward(dqkv, dout, qkv, out, lse, NH):
    """dqkv (B,T,3C), overwritten, from dout (B,T,C) and what the forward read and wrote."""
    B, T, C = dout.shape
    scale = 1 / math.sqrt(C // NH)
    for b in range(B):
        q, k, v = np.ascontiguousarray(heads(qkv, 3, NH)[:, b])
        do, o = np.ascontiguousarray(heads(dout, 1, NH)[0, b]), heads(out, 1, NH)[0, b]
        delta = (do * o).sum(2)
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        for start in range(0, T, ATTENTION_ROWS):
            stop = min(start + ATTENTION_ROWS, T)
            att = q[:, start:stop] @ k[:, :stop].swapaxes(1, 2)
            datt = do[:, start:stop] @ v[:, :stop].swapaxes(1, 2)
            attention_softmax_backward(att, datt, lse[b], delta, start, scale)
            dq[:, start:stop] = datt @ k[:, :stop]
            dk[:, :stop] += datt.swapaxes(1, 2) @ q[:, start:stop]
            dv[:, :stop] += att.swapaxes(1, 2) @ do[:, start:stop]
        heads(dqkv, 3, NH)[:, b] = dq, dk, dv


@njit_parallel
def attention_softmax_backward(att, datt, lse, delta, start, scale):
    """In place: scores att (NH,rows,columns) become probabilities, and datt, the gradients of these, those of q.k.

    delta (NH,T) is a row's sum of probability times gradient, which is the dot product of its out and dout.
    """
    NH, rows, columns = att.shape
    factor = att.dtype.type(scale)
    for row in prange(NH * rows):
        h, r = row // rows, row % rows
        seen = start + r + 1
        for j in range(seen):
            att[h, r, j] = exp(factor * att[h, r, j] - lse[h, start + r])
            datt[h, r, j] = factor * att[h, r, j] * (datt[h, r, j] - delta[h, start + r])
        att[h, r, seen:] = 0
        datt[h, r, seen:] = 0


# ---------------------------------------------------------------------------------------------------------------------
# The steps of attention as llm.c first had them, with the (T,T) matrices in memory


def permute_forward(q, k, v, qkv):
    """q, k, v (B,NH,T,hs) out of qkv (B,T,3C)."""
    q[:], k[:], v[:] = heads(qkv, 3, q.shape[1])


def permute_backward(dqkv, dq, dk, dv):
    """dqkv (B,T,3C) out of dq, dk, dv (B,NH,T,hs)."""
    heads(dqkv, 3, dq.shape[1])[:] = dq, dk, dv


def unpermute_forward(out, inp):
    """out (B,T,C) out of inp (B,NH,T,hs)."""
    heads(out, 1, inp.shape[1])[0] = inp


def unpermute_backward(dinp, dout):
    """dinp (B,NH,T,hs) out of dout (B,T,C)."""
    dinp[:] = heads(dout, 1, dinp.shape[1])[0]


def trimat_forward(preatt, qkv, NH):
    """preatt (B,NH,T,T) = q.k / sqrt(hs) on the diagonal and left of it; right of it nothing is written."""
    q, k, _ = heads(qkv, 3, NH)
    B, T, C = qkv.shape
    lower = np.tri(T, dtype=bool)
    for b in range(B):
        scores = q[b] @ k[b].swapaxes(1, 2)
        np.multiply(scores, scores.dtype.type(1.0 / math.sqrt(C // 3 // NH)), out=preatt[b], where=lower)


@njit_parallel
def softmax_autoregressive_forward(att, preatt, scale):
    """att (B,NH,T,T): row t is the softmax of scale * preatt over columns 0 to t, and zero right of the diagonal."""
    B, NH, T, _ = att.shape
    for row in prange(B * NH * T):
        b, h, t = row // (NH * T), row // T % NH, row % T
        for j in range(T):
            att[b, h, t, j] = preatt[b, h, t, j] if j <= t else 0
        softmax(att[b, h, t, : t + 1], scale)


@njit_parallel
def softmax_autoregressive_backward(dpreatt, datt, att, scale):
    """dpreatt (B,NH,T,T) = scale * att * (datt - the row's sum of att * datt), zero right of the diagonal."""
    B, NH, T, _ = att.shape
    factor = att.dtype.type(scale)
    for row in prange(B * NH * T):
        b, h, t = row // (NH * T), row // T % NH, row % T
        total = 0.0
        for j in range(t + 1):
            total += att[b, h, t, j] * datt[b, h, t, j]
        delta = att.dtype.type(total)
        for j in range(t + 1):
            dpreatt[b, h, t, j] = factor * att[b, h, t, j] * (datt[b, h, t, j] - delta)
        dpreatt[b, h, t, t + 1 :] = 0


# ---------------------------------------------------------------------------------------------------------------------
# softmax, crossentropy, and both with their backward at once: the classifier


@njit_parallel
def softmax_forward(out, inp):
    """out (N,C): each row the softmax of inp's."""
    N, C = inp.shape
    for n in prange(N):
        for c in range(C):
            out[n, c] = inp[n, c]
        softmax(out[n], 1.0)


@njit_parallel
def crossentropy_forward(losses, probs, targets):
    """losses (N,) = -log probs[n, targets[n]]; probs (N,Vp), targets int32 (N,)."""
    for n in prange(len(losses)):
        losses[n] = -math.log(probs[n, targets[n]])


@njit_parallel
def crossentropy_softmax_backward(dlogits, dlosses, probs, targets, V):
    """dlogits (N,Vp) += (probs - onehot(targets)) * dlosses[:, None] in the columns below V; dlosses (N,)."""
    for n in prange(len(dlosses)):
        for i in range(V):
            dlogits[n, i] += probs[n, i] * dlosses[n]
        dlogits[n, targets[n]] -= dlosses[n]


@njit_parallel
def fused_classifier(logits, losses, dloss, targets, V):
    """In place, a row of logits (N,Vp) becomes its gradient (softmax - onehot(target)) * dloss; losses (N,) in nats.

    targets int32 (N,), dloss a number, 1/N for a mean. Columns from V on are never read, and zeroed.
    """
    for n in prange(len(logits)):
        target = targets[n]
        target_logit = logits[n, target]
        losses[n] = softmax(logits[n, :V], 1.0) - target_logit
        logits[n, target] -= 1
        for i in range(V):
            logits[n, i] *= dloss
        logits[n, V:] = 0


# ---------------------------------------------------------------------------------------------------------------------
# AdamW (Loshchilov and Hutter 2017) and the norm of the gradient


@njit_parallel
def adamw_update(params, grads, m, v, step, learning_rate, grad_scale, beta1, beta2, eps, weight_decay):
    """One step on params, m and v, 1-D as grads, which are multiplied by grad_scale first.

    step int32 (1,) counts from 1; learning_rate and grad_scale (1,) are arrays as step is; the rest are numbers.
    """
    real = params.dtype.type
    b1, b2, a1, a2 = real(beta1), real(beta2), real(1 - beta1), real(1 - beta2)
    correction1 = real(1 / (1 - beta1 ** float(step[0])))
    correction2 = real(1 / (1 - beta2 ** float(step[0])))
    lr, scale, epsilon, decay = real(learning_rate[0]), real(grad_scale[0]), real(eps), real(weight_decay)
    for i in prange(params.size):
        g = grads[i] * scale
        m[i] = b1 * m[i] + a1 * g
        v[i] = b2 * v[i] + a2 * g * g
        params[i] -= lr * (m[i] * correction1 / (math.sqrt(v[i] * correction2) + epsilon) + decay * params[i])


@njit_parallel
def global_norm_squared(out, inp):
    """out (1,) = the sum of the squares of inp, 1-D; overwritten."""
    size = 65536
    sums = np.zeros((inp.size + size - 1) // size)
    for block in prange(len(sums)):
        total = 0.0
        for i in range(block * size, min((block + 1) * size, inp.size)):
            total += inp[i] * inp[i]
        sums[block] = total
    out[0] = sums.sum()
