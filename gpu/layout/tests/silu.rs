//! The activation against f64.

mod support;

use ferry_layout::silu::{Activation, sigmoid};
use ferry_layout::{f32_of_bf16_bits, sigmoids};
use support::Std;

const CLAMPED: Activation = Activation::Clamped {
    alpha: 1.702,
    limit: 7.0,
};

fn exact(activation: Activation, gate: f64, up: f64) -> f64 {
    match activation {
        Activation::Silu => gate / (1.0 + (-gate).exp()) * up,
        Activation::Clamped { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            (up + 1.0) * gate / (1.0 + (-alpha * gate).exp())
        }
    }
}

#[test]
fn every_bf16_gate_is_near_the_exact_result() {
    for activation in [Activation::Silu, CLAMPED] {
        for bits in 0..=u16::MAX {
            let gate = f32::from_bits(u32::from(bits) << 16);
            // The last two are beyond the limit.
            for up in [1.0, -0.75, 3.5, 9.5, -9.5] {
                compare(activation, gate, up);
            }
        }
    }
}

fn compare(activation: Activation, gate: f32, up: f32) {
    let found = activation.apply(gate, up, Std);
    if gate.is_nan() {
        return assert!(found.is_nan(), "{gate}");
    }
    let wanted = exact(activation, f64::from(gate), f64::from(up));
    // What is too large for f32, and the limit at minus infinity, which f64 cannot say either.
    if !wanted.is_finite() || wanted.abs() > f64::from(f32::MAX) {
        return assert!(!found.is_finite() || found.abs() > 1e38, "{gate}: {found}");
    }
    let error = (f64::from(found) - wanted).abs();
    // The sigmoid's argument is rounded, too.
    let argument = match activation {
        Activation::Silu => f64::from(gate.abs()).min(200.0),
        Activation::Clamped { alpha, .. } => f64::from((alpha * gate).abs()).min(200.0),
    };
    let relative = 2f64.powi(-20) + argument * 2f64.powi(-24);
    let bound = wanted.abs() * relative + 3e-38;
    assert!(
        error <= bound,
        "{activation:?} {gate} {up}: {found}, not {wanted}"
    );
}

#[test]
fn the_table_has_the_sigmoid_of_every_bf16() {
    for bits in 0..=u16::MAX {
        let other = !bits;
        let pair = u32::from(bits) | u32::from(other) << 16;
        let offsets = sigmoids::offsets(pair, sigmoids::clamped);
        for (bits, offset) in [(bits, offsets & 0xffff), (other, offsets >> 16)] {
            assert!(
                offset % 4 == 0 && offset / 4 < sigmoids::PLACES,
                "{bits:#x}"
            );
            let gate = f32_of_bf16_bits(bits);
            let found = sigmoid(sigmoids::argument(offset / 4), Std);
            let wanted = sigmoid(gate, Std);
            // A NaN's is multiplied with the NaN.
            let is_same = found.to_bits() == wanted.to_bits() || gate.is_nan();
            assert!(
                is_same && found.is_finite(),
                "{gate:e}: {found:e}, not {wanted:e}"
            );
        }
    }
}

#[test]
fn results_by_hand() {
    assert_eq!(Activation::Silu.apply(0.0, 5.0, Std), 0.0);
    assert_eq!(Activation::Silu.apply(100.0, 2.0, Std), 200.0);
    assert_eq!(Activation::Silu.apply(-200.0, 2.0, Std), -0.0);
    assert_eq!(
        CLAMPED.apply(100.0, 100.0, Std),
        CLAMPED.apply(7.0, 7.0, Std)
    );
    assert_eq!(CLAMPED.apply(0.0, -100.0, Std), 0.0);
    // Up has a bound on both sides, gate only above.
    assert_eq!(
        CLAMPED.apply(2.0, -100.0, Std),
        CLAMPED.apply(2.0, -7.0, Std)
    );
    assert_ne!(CLAMPED.apply(-9.0, 1.0, Std), CLAMPED.apply(-7.0, 1.0, Std));
    assert!(Activation::Silu.apply(1.0, f32::NAN, Std).is_nan());
}
