//! A layer of experts next to one that all tokens share, worked out in f64, for the tests of both
//! together.

use burn::tensor::{Device, FloatDType};
use burn_ds4_ops::moe::{Experts, moe_ffn};

use super::common::{assert_within, floats, half_unit, narrow, read};
use super::experts::{Layer, Size, Stacks};
use super::packing::{Format, Packed, rounded};
use super::sums::smallest;

/// The arguments of `moe_ffn`, on the host: two layers with the same tokens, the second of one
/// expert that all have.
pub struct Both {
    pub own: Layer,
    pub shared: Layer,
}

/// The weights of both on a device.
pub struct BothStacks {
    pub own: Stacks,
    pub shared: Stacks,
}

impl Both {
    fn new(own: Layer, mut shared: Layer) -> Self {
        shared.x.clone_from(&own.x);
        shared.ids.fill(0);
        shared.weights.fill(1.0);
        Self { own, shared }
    }

    pub fn random(
        (size, inner): (Size, usize),
        formats: [Format; 2],
        dtype: FloatDType,
        seed: u64,
    ) -> Self {
        let [own, shared] = formats;
        let own = Layer::random(size, own, dtype, seed);
        let shared = Layer::random(of_shared(size, inner), shared, dtype, seed + 10);
        Self::new(own, shared)
    }

    /// Sums are exact, and large enough of both kinds to be seen in each other's.
    pub fn exact(
        (size, inner): (Size, usize),
        formats: [Format; 2],
        dtype: FloatDType,
        seed: u64,
    ) -> Self {
        let [own, shared] = formats;
        let mut own = Layer::exact(size, own, dtype, seed);
        let shape = [1, size.d, inner];
        let down = Packed::exact(shared.of_down(), shape, -14, seed + 20);
        let mut shared = Layer::exact(of_shared(size, inner), shared, dtype, seed + 10);
        shared.down = down;
        own.limit = Some(64.0);
        shared.limit = Some(64.0);
        Self::new(own, shared)
    }

    pub fn tokens(&self, tokens: std::ops::Range<usize>) -> Self {
        Self {
            own: self.own.tokens(tokens.clone()),
            shared: self.shared.tokens(tokens),
        }
    }

    pub fn stacks(&self, device: &Device) -> BothStacks {
        BothStacks {
            own: self.own.stacks(device),
            shared: self.shared.stacks(device),
        }
    }

    pub fn run(&self, device: &Device) -> Vec<f32> {
        self.run_with(&self.stacks(device), device)
    }

    pub fn run_with(&self, stacks: &BothStacks, device: &Device) -> Vec<f32> {
        let Size { tokens, k, d, .. } = self.own.size;
        let x = self.own.x(device);
        let weights = floats(&self.own.weights, [tokens, k], device);
        let routed = experts(&stacks.own, self.own.limit);
        let shared = experts(&stacks.shared, self.shared.limit);
        let output = moe_ffn(x.clone(), self.own.ids(device), weights, routed, shared);
        let output = output.expect("arguments that fit");
        assert_eq!((output.dims(), output.dtype()), ([tokens, d], x.dtype()));
        read(&output)
    }

    /// Every output, and the errors that are allowed.
    pub fn expected(&self) -> (Vec<f32>, Vec<f64>) {
        let dtype = self.own.rounding.dtype;
        let both = self.own.expected().into_iter().zip(self.shared.expected());
        let (expected, allowed): (Vec<f64>, Vec<f64>) = both
            .map(|(own, shared)| (own.0 + shared.0, own.1 + shared.1))
            .unzip();
        let expected = rounded(&narrow(&expected), dtype);
        // The expected value is rounded, too.
        let unit = 2.0 * half_unit(dtype);
        let allowed = allowed.iter().zip(&expected).map(|(allowed, expected)| {
            allowed + unit * f64::from(*expected).abs() + smallest(dtype)
        });
        let allowed = allowed.collect();
        (expected, allowed)
    }

    /// Compares what a device gives with the oracle. In f32, sums that are exact have to be.
    #[track_caller]
    pub fn check(&self, name: &str, device: &Device) {
        let (expected, allowed) = self.expected();
        let formats = [&self.own, &self.shared].map(|layer| layer.gate_up.format());
        let what = format!("{name} {formats:?} {:?}", self.own.size);
        assert_within(&self.run(device), &expected, |index| allowed[index], &what);
    }
}

pub fn experts(stacks: &Stacks, limit: Option<f64>) -> Experts<'_> {
    Experts {
        gate_up: &stacks.gate_up,
        down: &stacks.down,
        limit,
    }
}

fn of_shared(size: Size, inner: usize) -> Size {
    Size {
        k: 1,
        experts: 1,
        inner,
        ..size
    }
}
