// The router's choice, a warp a token: the `top_k` experts with the largest logits (BF16; of equal ones the
// first), at most 32, and as weights the sigmoids of these logits over their sum.
extern "C" __global__ void route(const unsigned short* logits, long long tokens, long long experts,
                                 long long top_k, int* ids, float* weights) {
    const float infinity = __int_as_float(0x7f800000);
    long long token = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (token >= tokens) return;
    logits += token * experts;
    float last = infinity, own = 0.0f, sum = 0.0f;
    int last_expert = -1;
    for (int k = 0; k < top_k; k++) {
        // The first of those that come after the one chosen last.
        float best = -infinity;
        int expert = experts;
        for (int e = lane; e < experts; e += 32) {
            float logit = __int_as_float(logits[e] << 16);
            bool is_left = logit < last || (logit == last && e > last_expert);
            if (is_left && logit > best) {
                best = logit;
                expert = e;
            }
        }
        for (int distance = 16; distance > 0; distance /= 2) {
            float logit = __shfl_xor_sync(~0u, best, distance);
            int e = __shfl_xor_sync(~0u, expert, distance);
            if (logit > best || (logit == best && e < expert)) {
                best = logit;
                expert = e;
            }
        }
        last = best;
        last_expert = expert;
        float weight = 1.0f / (1.0f + __expf(-best));
        sum += weight;
        if (lane == k) {
            own = weight;
            ids[token * top_k + k] = expert;
        }
    }
    if (lane < top_k) weights[token * top_k + lane] = own / sum;
}
