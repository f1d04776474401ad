//! The router's choice.

/// The `top_k` experts of each token with the largest sigmoid of their logits, which, divided by
/// their sum, are the weights. As in DeepSeek-V3, without its groups of experts and without its
/// bias.
pub fn choose(logits: &[f32], experts: usize, top_k: usize) -> (Vec<i32>, Vec<f32>) {
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    let mut best: Vec<(f32, usize)> = Vec::with_capacity(top_k + 1);
    for row in logits.chunks_exact(experts) {
        best.clear();
        for (expert, &logit) in row.iter().enumerate() {
            if best.len() == top_k && logit <= best[top_k - 1].0 {
                continue;
            }
            let at = best.partition_point(|&(other, _)| other >= logit);
            best.insert(at, (logit, expert));
            best.truncate(top_k);
        }
        let sigmoid = |logit: f32| 1.0 / (1.0 + (-logit).exp());
        let sum: f32 = best.iter().map(|&(logit, _)| sigmoid(logit)).sum();
        ids.extend(best.iter().map(|&(_, expert)| expert as i32));
        weights.extend(best.iter().map(|&(logit, _)| sigmoid(logit) / sum));
    }
    (ids, weights)
}
