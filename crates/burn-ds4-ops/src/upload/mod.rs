//! Weights as files have them, on their way to a device: words in pieces, and what is done with
//! them there in place of on the host.
//!
//! A device that takes pieces ([`in_pieces`]) has the words of a tensor in memory of its own from
//! the beginning. The host fills one piece after the other, in memory that the device can read by
//! itself where the driver has such memory (CUDA: page-locked), while the piece before is copied.
//! So the host needs a few pieces of memory, however large a tensor is.

mod backend;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;
#[cfg(all(feature = "cube", not(feature = "fusion")))]
mod pieces;
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};

use crate::OpError;
use crate::validation::{expect_dtype, expect_supported};
pub(crate) use backend::UploadOps;

/// Codes and floats of which some bits are all set where they are NaN or infinite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// FP8 of 1-4-3, which has no infinity.
    E4m3,
    /// A power of two, which has neither sign nor infinity.
    E8m0,
    /// 16 bits.
    Bf16,
    /// 16 bits.
    F16,
    /// 32 bits.
    F32,
}

impl Encoding {
    /// The bits of an element, and those that are all set.
    pub(crate) const fn mask(self) -> (u32, u32) {
        match self {
            Self::E4m3 => (8, 0x7f),
            Self::E8m0 => (8, 0xff),
            Self::Bf16 => (16, 0x7f80),
            Self::F16 => (16, 0x7c00),
            Self::F32 => (32, 0x7f80_0000),
        }
    }
}

/// Whether [`upload`] gives the device pieces. It does with CubeCL's devices, unless with Burn's
/// fusion.
pub fn in_pieces(device: &Device) -> bool {
    #[cfg(all(feature = "cube", not(feature = "fusion")))]
    return crate::kinds::client(device).is_some();
    #[cfg(not(all(feature = "cube", not(feature = "fusion"))))]
    {
        let _ = device;
        false
    }
}

/// A `u32` tensor of `words` words, little endian. `fill` is given one piece after the other, of
/// whole words, whose bytes it writes, with the place of the first of them. Where a device does not
/// take pieces, there is one.
///
/// Where a device has no memory for it, the tensor is lost, as in Burn: [`check_tensors`] tells.
///
/// # Errors
///
/// That of `fill`.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use std::convert::Infallible;
///
/// use burn::tensor::Device;
/// use burn_ds4_ops::upload::upload;
///
/// let words = upload(&Device::flex(), 2, |first, piece| {
///     for (at, byte) in (first..).zip(piece) {
///         *byte = at as u8;
///     }
///     Ok::<(), Infallible>(())
/// });
/// let words = words.unwrap().into_data();
/// assert_eq!(words.as_slice::<u32>().unwrap(), [0x0302_0100, 0x0706_0504]);
/// # }
/// ```
///
/// [`check_tensors`]: crate::device::check_tensors
pub fn upload<E>(
    device: &Device,
    words: usize,
    mut fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
) -> Result<Tensor<1, Int>, E> {
    #[cfg(all(feature = "cube", not(feature = "fusion")))]
    if let Some(tensor) = pieces::upload(device, words, pieces::PIECE_BYTES, &mut fill) {
        return tensor;
    }
    let mut bytes = vec![0; 4 * words];
    fill(0, &mut bytes)?;
    let data = TensorData::from_bytes_vec(bytes, [words], DType::U32);
    Ok(Tensor::from_data(data, (device, DType::U32)))
}

/// Words of FP4 codes in [`Fp4Layout::Repacked`](crate::quant::Fp4Layout::Repacked), of those as
/// released files have them: on the device what [`repack_fp4`](crate::quant::repack_fp4) is on the
/// host, to the bit.
///
/// A tensor that nobody else holds is written in its place.
///
/// # Errors
///
/// [`OpError::DtypeMismatch`] unless the words are `u32`.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{DType, Device, Tensor, TensorData};
/// use burn_ds4_ops::{quant::repack_fp4, upload::repack_fp4_words};
///
/// let mut host = [0x7654_3210_u32, 0xf];
/// let device = (&Device::flex(), DType::U32);
/// let words = Tensor::from_data(TensorData::from(host), device);
/// repack_fp4(&mut host);
/// repack_fp4_words(words)?.into_data().assert_eq(&TensorData::from(host), true);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn repack_fp4_words(words: Tensor<1, Int>) -> Result<Tensor<1, Int>, OpError> {
    expect_dtype("words", "U32", &words, &[DType::U32])?;
    if words.dims() == [0] {
        return Ok(words);
    }
    let repacked = Dispatch::repack_fp4_words(words.into_dispatch());
    Ok(Tensor::from_dispatch(repacked))
}

/// Whether words have any element that is NaN or infinite: `i32` `[1]`, 1 or 0. The lowest bits of
/// a word are its first element.
///
/// # Errors
///
/// [`OpError::DtypeMismatch`] unless the words are `u32`.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{DType, Device, Tensor, TensorData};
/// use burn_ds4_ops::upload::{Encoding, any_not_finite};
///
/// let device = (&Device::flex(), DType::U32);
/// let words = Tensor::from_data(TensorData::from([0x7f7f_7f7f_u32, 0xff00]), device);
/// for (encoding, expected) in [(Encoding::E8m0, 1), (Encoding::F32, 0)] {
///     let found = any_not_finite(words.clone(), encoding)?;
///     found.into_data().assert_eq(&TensorData::from([expected]), true);
/// }
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn any_not_finite(
    words: Tensor<1, Int>,
    encoding: Encoding,
) -> Result<Tensor<1, Int>, OpError> {
    expect_dtype("words", "U32", &words, &[DType::U32])?;
    if words.dims() == [0] {
        return Ok(Tensor::zeros([1], (&words.device(), DType::I32)));
    }
    let found = Dispatch::any_not_finite(words.into_dispatch(), encoding);
    Ok(Tensor::from_dispatch(found))
}

/// The floats whose bits the words have, the first in the lowest: on devices that take pieces, in
/// the memory of the words.
///
/// # Errors
///
/// [`OpError::DtypeMismatch`] unless the words are `u32`, [`OpError::UnsupportedDtype`] for a
/// `dtype` that the device does not compute in.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
/// use burn_ds4_ops::upload::floats_of;
///
/// let device = (&Device::flex(), DType::U32);
/// let words = Tensor::from_data(TensorData::from([0xc000_3f80_u32]), device);
/// let floats = floats_of(words, FloatDType::BF16)?;
/// assert_eq!(floats.into_data().iter::<f32>().collect::<Vec<_>>(), [1.0, -2.0]);
/// # }
/// # Ok::<(), burn_ds4_ops::OpError>(())
/// ```
pub fn floats_of(words: Tensor<1, Int>, dtype: FloatDType) -> Result<Tensor<1>, OpError> {
    expect_dtype("words", "U32", &words, &[DType::U32])?;
    let device = words.device();
    expect_supported(dtype, &device)?;
    let dtype = DType::from(dtype);
    let count = words.dims()[0] * size_of::<u32>() / dtype.size();
    #[cfg(all(feature = "cube", not(feature = "fusion")))]
    if let Some(floats) = pieces::floats_of(&words, count, dtype) {
        return Ok(floats);
    }
    let data = TensorData::from_bytes(words.into_data().into_bytes(), [count], dtype);
    Ok(Tensor::from_data(data, (&device, dtype)))
}
