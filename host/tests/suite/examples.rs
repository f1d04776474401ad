//! Examples that run anywhere, run.

#[path = "../../examples/moe_simulated.rs"]
mod moe_simulated;

#[test]
fn three_layers_agree_with_a_dense_reference() {
    moe_simulated::main().unwrap();
}
