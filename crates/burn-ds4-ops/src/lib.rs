//! DeepSeek-V4 inference operators for the [Burn](https://burn.dev) deep-learning framework.
//!
//! Every operator takes and returns Burn tensors and runs on every Burn device.
//!
//! | module | operators |
//! |---|---|
//! | [`quant`] | FP8 and FP4 weight decoding, FP8 and FP4 activation round trips, Hadamard transform |
//!
//! [`device`] turns a name such as `cuda:1` into a [`Device`](burn::tensor::Device), or into a one-line error where it is
//! not compiled in or not present. Features `flex` (default), `wgpu`, `cuda` and `cpu` choose the backends.

pub mod device;
mod error;
pub mod quant;

pub use error::OpError;
