//! Products of many rows: by CubeK's kernels, but for 16 bits on Hopper.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::matmul::init_matmul_output;
use burn_cubecl::tensor::CubeTensor;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level;
use cubek::matmul::strategy::Strategy;
use cubek::std::InputBinding;

use super::wgmma::{can_multiply_dense, multiply_dense};

/// Multiplies with a kernel that uses no tensor cores: only those keep f32 operands as they are.
pub(crate) fn f32_matmul(lhs: CubeTensor, rhs: CubeTensor) -> CubeTensor {
    let f32 = dtype_to_storage_type(DType::F32);
    let output = init_matmul_output(&lhs, &rhs, DType::F32);
    let client = output.client.clone();
    let mut dtypes = MatmulElems::from_globals(&MatmulGlobalElems {
        lhs: f32,
        rhs: f32,
        out: f32,
    });
    launch_ref(
        &Strategy::MultiLevel(multi_level::Strategy::SimpleUnit(Default::default())),
        &client,
        InputBinding::new(lhs.binding(), f32),
        InputBinding::new(rhs.binding(), f32),
        output.clone().binding(),
        &mut dtypes,
    )
    .expect("the kernel without tensor cores takes any shape");
    output
}

/// `x · weightᵀ` for f16 or bf16 matrices of one dtype, on tensor cores if there are any; the f32
/// sums become `out`.
pub(crate) fn half_linear(x: CubeTensor, weight: CubeTensor, out: DType) -> CubeTensor {
    if can_multiply_dense(&x, &weight) {
        return multiply_dense(x, weight, out);
    }
    let (lhs, rhs) = (x, CubeBackend::float_transpose(weight));
    let dtype = dtype_to_storage_type(lhs.dtype);
    let output = init_matmul_output(&lhs, &rhs, out);
    let out = dtype_to_storage_type(out);
    let client = output.client.clone();
    // Fastest first. A strategy that the device or the shape rules out fails before it launches.
    let strategies = [
        Strategy::MultiLevel(multi_level::Strategy::SpecializedTmaMma(Default::default())),
        Strategy::MultiLevel(multi_level::Strategy::DoubleCyclicMma(Default::default())),
        Strategy::Auto,
    ];
    let launched = strategies.iter().any(|strategy| {
        let mut dtypes = MatmulElems::from_globals(&MatmulGlobalElems {
            lhs: dtype,
            rhs: dtype,
            out,
        });
        launch_ref(
            strategy,
            &client,
            InputBinding::new(lhs.clone().binding(), dtype),
            InputBinding::new(rhs.clone().binding(), dtype),
            output.clone().binding(),
            &mut dtypes,
        )
        .is_ok()
    });
    assert!(launched, "matmul: no kernel for this device");
    output
}
