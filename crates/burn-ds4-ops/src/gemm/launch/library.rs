//! Products of many rows: by CubeK's kernels, but for 16 bits on Hopper.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, FloatDType};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::matmul::{MatmulStrategy, init_matmul_output, matmul as burn_matmul};
use burn_cubecl::tensor::CubeTensor;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems, MatmulSetupError};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level;
use cubek::matmul::strategy::Strategy;
use cubek::std::InputBinding;

use super::wgmma::{can_multiply_dense, multiply_dense};

/// `lhs · rhs` in the dtype of both, whose products are summed in f32.
pub(crate) fn matmul(lhs: CubeTensor, rhs: CubeTensor) -> CubeTensor {
    let dtype = lhs.dtype;
    if dtype == DType::F32 {
        return f32_matmul(lhs, rhs);
    }
    let strategy = MatmulStrategy::default();
    burn_matmul(lhs.clone(), rhs.clone(), None, strategy, dtype)
        .unwrap_or_else(|_| wide_matmul(lhs, rhs, dtype))
}

/// `lhs · rhs` in f32, for operands of 16 bits that no kernel takes: without tensor cores, theirs
/// takes more shared memory than some devices have.
fn wide_matmul(lhs: CubeTensor, rhs: CubeTensor, out: DType) -> CubeTensor {
    let wide = |tensor| CubeBackend::float_cast(tensor, FloatDType::F32);
    CubeBackend::float_cast(f32_matmul(wide(lhs), wide(rhs)), out.into())
}

/// Multiplies with a kernel that uses no tensor cores: only those keep f32 operands as they are.
fn f32_matmul(lhs: CubeTensor, rhs: CubeTensor) -> CubeTensor {
    // The second has no tiles that a shape could rule out.
    let strategies = [
        multi_level::Strategy::SimpleUnit(Default::default()),
        multi_level::Strategy::Naive,
    ];
    f32_matmul_by(&strategies, lhs, rhs)
}

/// [`f32_matmul`] by the first strategy that takes the operands.
///
/// # Panics
///
/// If none does, as Burn's own products do.
fn f32_matmul_by(
    strategies: &[multi_level::Strategy],
    lhs: CubeTensor,
    rhs: CubeTensor,
) -> CubeTensor {
    let output = init_matmul_output(&lhs, &rhs, DType::F32);
    if !launch_any(strategies, &lhs, &rhs, &output) {
        let [lhs, rhs] = [&lhs, &rhs].map(TensorMetadata::shape);
        panic!("no kernel multiplies {lhs:?} by {rhs:?} in f32 on this device");
    }
    output
}

/// `x · weightᵀ` for large M: 16-bit matrices of one dtype on tensor cores if there are any, all
/// others in f32. The f32 sums become `out`.
pub(crate) fn linear(x: CubeTensor, weight: CubeTensor, out: DType) -> CubeTensor {
    if can_multiply_dense(&x, &weight) {
        return multiply_dense(x, weight, out);
    }
    // Fastest first.
    let strategies = [
        multi_level::Strategy::SpecializedTmaMma(Default::default()),
        multi_level::Strategy::DoubleCyclicMma(Default::default()),
        multi_level::Strategy::SimpleCyclicCmma(Default::default()),
        multi_level::Strategy::SimpleUnit(Default::default()),
    ];
    linear_by(&strategies, x, weight, out)
}

/// [`linear`] by the first strategy that takes the operands, else in f32.
fn linear_by(
    strategies: &[multi_level::Strategy],
    x: CubeTensor,
    weight: CubeTensor,
    out: DType,
) -> CubeTensor {
    let weight = CubeBackend::float_transpose(weight);
    if x.dtype == weight.dtype && x.dtype != DType::F32 {
        let output = init_matmul_output(&x, &weight, out);
        if launch_any(strategies, &x, &weight, &output) {
            return output;
        }
    }
    wide_matmul(x, weight, out)
}

/// Launches the first strategy that takes the operands, and returns whether there is one. What the
/// device or the shape rules out fails before it launches.
fn launch_any(
    strategies: &[multi_level::Strategy],
    lhs: &CubeTensor,
    rhs: &CubeTensor,
    output: &CubeTensor,
) -> bool {
    let mut strategies = strategies.iter().cloned();
    strategies.any(|strategy| launch(strategy, lhs.clone(), rhs.clone(), output).is_ok())
}

fn launch(
    strategy: multi_level::Strategy,
    lhs: CubeTensor,
    rhs: CubeTensor,
    output: &CubeTensor,
) -> Result<(), MatmulSetupError> {
    let [lhs_dtype, rhs_dtype, out] =
        [lhs.dtype, rhs.dtype, output.dtype].map(dtype_to_storage_type);
    let mut dtypes = MatmulElems::from_globals(&MatmulGlobalElems {
        lhs: lhs_dtype,
        rhs: rhs_dtype,
        out,
    });
    launch_ref(
        &Strategy::MultiLevel(strategy),
        &output.client,
        InputBinding::new(lhs.binding(), lhs_dtype),
        InputBinding::new(rhs.binding(), rhs_dtype),
        output.clone().binding(),
        &mut dtypes,
    )
}

// With fusion, tensors are of another backend.
#[cfg(all(test, not(feature = "fusion")))]
mod tests {
    use burn::tensor::{Distribution, Tensor, TensorData};

    use super::*;
    use crate::device::DeviceSpec;

    /// TMA takes no rows of 6 bytes, and no device but a few of NVIDIA's has it.
    fn tma() -> multi_level::Strategy {
        multi_level::Strategy::SpecializedTmaMma(Default::default())
    }

    fn cube(tensor: Tensor<2>) -> CubeTensor {
        let tensor = tensor.try_into_primitive::<CubeBackend>();
        tensor.expect("a tensor of this backend")
    }

    #[test]
    fn f32_is_multiplied_without_tiles_where_tiles_are_ruled_out() {
        for spec in [DeviceSpec::Wgpu, DeviceSpec::Cuda(0)] {
            let Ok(device) = spec.init() else {
                continue;
            };
            let of = |rows: [[f32; 3]; 2]| cube(Tensor::from_data(rows, &device));
            let lhs = of([[1.0, 2.0, 3.0], [-4.0, 5.0, 0.5]]);
            let rhs = of([[2.0, 0.25, 1.0], [1.0, 1.0, 8.0]]);
            let rhs = CubeBackend::float_transpose(rhs);
            let strategies = [tma(), multi_level::Strategy::Naive];
            let product = f32_matmul_by(&strategies, lhs, rhs);
            let product = Tensor::<2>::from_primitive::<CubeBackend>(product);
            let expected = TensorData::from([[5.5_f32, 27.0], [-6.25, 5.0]]);
            product.into_data().assert_eq(&expected, true);
        }
    }

    #[test]
    fn sixteen_bits_are_multiplied_in_f32_where_no_strategy_takes_them() {
        for spec in [DeviceSpec::Wgpu, DeviceSpec::Cuda(0)] {
            let device = spec.init().ok();
            let Some(device) = device.filter(|own| own.supports_dtype(FloatDType::F16)) else {
                continue;
            };
            for strategies in [&[][..], &[tma()]] {
                let random = |shape| {
                    let values = Tensor::<2>::random(shape, Distribution::Default, &device);
                    values.cast(FloatDType::F16)
                };
                let (x, weight) = (random([40, 3]), random([24, 3]));
                let wide = |tensor: &Tensor<2>| tensor.clone().cast(FloatDType::F32);
                let expected = wide(&x).matmul(wide(&weight).transpose());
                let product = linear_by(strategies, cube(x), cube(weight), DType::F32);
                let product = Tensor::<2>::from_primitive::<CubeBackend>(product);
                let error = (product - expected).abs().max().into_scalar::<f32>();
                assert!(error < 1e-5, "{spec}: {error}");
            }
        }
    }
}
