//! The activation against f64.

use crate::support::Std;
use ferry_layout::sigmoids::GateRange;
use ferry_layout::silu::{Activation, sigmoid};
use ferry_layout::{f32_of_bf16_bits, sigmoids};

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
    // Too large for f32, or the limit at minus infinity, which f64 cannot express either.
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

/// Steepnesses of every size and sign, subnormal ones among them, and 0.
fn steepnesses() -> impl Iterator<Item = f32> {
    let some = (0..0x7f80_u32).step_by(0x1d3).map(|bits| bits << 16);
    let ends = [0, 1, f32::MAX.to_bits()];
    let ordinary = [1.702_f32, 1.0, 0.5, 3.999].map(f32::to_bits);
    let positive = some.chain(ends).chain(ordinary).map(f32::from_bits);
    positive.flat_map(|alpha| [alpha, -alpha])
}

#[test]
fn the_table_has_the_sigmoid_of_every_bf16() {
    table_has_all(Activation::Silu);
    let limits = [7.0, 0.3, 1e-42, 1e-6, f32::MAX, f32::INFINITY];
    for (alpha, limit) in steepnesses().zip(limits.into_iter().cycle()) {
        table_has_all(Activation::Clamped { alpha, limit });
    }
    for limit in limits {
        let alpha = 1.702;
        table_has_all(Activation::Clamped { alpha, limit });
    }
}

fn table_has_all(activation: Activation) {
    let places = GateRange::of(activation);
    let table: Vec<f32> = (0..sigmoids::PLACES)
        .map(|place| places.sigmoid(place, activation, Std))
        .collect();
    for bits in 0..=u16::MAX {
        let pair = u32::from(bits) | u32::from(!bits) << 16;
        let offsets = places.offsets(pair, sigmoids::distances);
        for (bits, offset) in [
            (pair as u16, offsets & 0xffff),
            ((pair >> 16) as u16, offsets >> 16),
        ] {
            let gate = f32_of_bf16_bits(bits);
            assert!(offset % 4 == 0, "{bits:#x}");
            let found = table[offset as usize / 4];
            let wanted = activation.sigmoid(gate, Std);
            // The entry for a NaN is multiplied with the NaN.
            let is_same = found.to_bits() == wanted.to_bits() || gate.is_nan();
            assert!(
                is_same && found.is_finite(),
                "{activation:?} {gate:e}: {found:e}, not {wanted:e}"
            );
        }
    }
}

/// Premise of the table, checked for arguments that are no BF16s.
#[test]
fn arguments_beyond_the_table_have_the_sigmoids_of_its_ends() {
    let of = |bits: u32| sigmoid(f32::from_bits(bits), Std);
    const NEGATIVE: u32 = 1 << 31;
    let small = 2_f32.powf(-24.6).to_bits();
    // The last arguments, and some of the others.
    for bits in (small - 10_000..=small).chain((0..small).step_by(9_973)) {
        assert_eq!((of(bits), of(bits | NEGATIVE)), (0.5, 0.5), "{bits:#x}");
    }
    let large = 98.5_f32.to_bits();
    let all = large..=f32::INFINITY.to_bits();
    for bits in (large..large + 10_000).chain(all.step_by(9_973)) {
        assert_eq!((of(bits), of(bits | NEGATIVE)), (1.0, 0.0), "{bits:#x}");
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
