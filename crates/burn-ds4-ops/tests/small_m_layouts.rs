//! Products of views: rows with gaps between them, rows that start anywhere, columns that are rows.

use burn::tensor::{Device, FloatDType, Tensor};

use super::common::{compiles_slowly, some, values};
use super::linear::Input;
use super::products::{Product, every_pair, options, outputs, product};

const F32: FloatDType = FloatDType::F32;
type View = (&'static str, Tensor<2>);

/// Views with the same elements as the input.
fn views(input: &Input, device: &Device) -> Vec<View> {
    let [rows, columns] = input.shape;
    let dense = input.on(device);
    let column = || dense.clone().slice([0..rows, 0..1]);
    let beside = Tensor::cat(vec![dense.clone().neg(), dense.clone(), column()], 1);
    let above = Tensor::cat(vec![dense.clone().neg(), dense.clone()], 0);
    let odd = Tensor::cat(vec![column(), dense.clone(), column(), column()], 1);
    let turned = dense.clone().transpose().mul_scalar(1.0).transpose();
    let cube = dense.clone().reshape([1, rows, columns]).swap_dims(0, 1);
    vec![
        ("dense", dense),
        ("transposed", turned),
        (
            "columns of a wider matrix",
            beside.slice([0..rows, columns..2 * columns]),
        ),
        (
            "columns from an odd one on",
            odd.slice([0..rows, 1..columns + 1]),
        ),
        (
            "rows of a higher matrix",
            above.slice([rows..2 * rows, 0..columns]),
        ),
        ("three dimensions, swapped", cube.reshape([rows, columns])),
    ]
}

fn both_operands_may_be_any_view() {
    every_pair(|name, device, pair| {
        // Few rows, and where both are of one dtype many.
        let step = if pair.0 == pair.1 { 2 } else { 4 };
        let shapes = [[16, 33, 264], [5, 7, 129], [40, 24, 127], [1, 33, 264]];
        for &[m, n, k] in some(name, &shapes, step) {
            let whole = Product::exact([m, n, k], pair, k as u64);
            let (x, weights) = (whole.x.on(device), whole.weights.on(device));
            for (view, x) in views(&whole.x, device) {
                let y = product(x, weights.clone(), options(F32));
                whole.check_exact(&y, F32, &format!("{name} x: {view}"));
            }
            for (view, weights) in views(&whole.weights, device) {
                let y = product(x.clone(), weights, options(F32));
                whole.check_exact(&y, F32, &format!("{name} weights: {view}"));
            }
        }
    });
}

fn x_may_have_any_number_of_dimensions() {
    every_pair(|name, device, pair| {
        // The weights have two dimensions, whatever their dtype.
        if compiles_slowly(name) && pair.0 != pair.1 {
            return;
        }
        let whole = Product::exact([6, 33, 40], pair, 3);
        let (x, weights) = (whole.x.on(device), whole.weights.on(device));
        let cube = x.clone().reshape([2, 3, 40]);
        let swapped = x.clone().reshape([2, 3, 40]).swap_dims(0, 1);
        let turned = Product {
            x: Input::new([6, 40], pair.0, &read(swapped.clone())),
            weights: Input::new([33, 40], pair.1, &whole.weights.values),
        };
        for output in outputs(pair.0) {
            let options = options(output);
            let y = product(cube.clone(), weights.clone(), options);
            whole.check_exact(&y, output, &format!("{name} three dimensions"));
            let y = product(swapped.clone(), weights.clone(), options);
            turned.check_exact(&y, output, &format!("{name} three dimensions, swapped"));
        }
        let one = whole.rows(4..5);
        let vector = x.slice([4..5, 0..40]).reshape([40]);
        let y = product(vector, weights, options(F32));
        one.check_exact(&y, F32, &format!("{name} vector"));
    });
}

fn read(tensor: Tensor<3>) -> Vec<f32> {
    values(tensor.cast(F32))
}

fn rows_may_be_one_row_again_and_again() {
    every_pair(|name, device, pair| {
        let whole = Product::exact([1, 33, 264], pair, 2);
        let one = whole.weights.rows(0..1);
        let step = if pair.0 == pair.1 { 2 } else { 3 };
        for &rows in some(name, &[16, 3, 40], step) {
            let x = whole.x.on(device).expand([rows, 264]);
            let y = product(x, whole.weights.on(device), options(F32));
            for y in y.chunks(33) {
                whole.check_exact(y, F32, &format!("{name} x expanded"));
            }
            let repeated = one.on(device).expand([rows, 264]);
            let y = product(whole.x.on(device), repeated, options(F32));
            let expected = Product {
                x: whole.x.rows(0..1),
                weights: Input::new([rows, 264], one.dtype, &one.values.repeat(rows)),
            };
            expected.check_exact(&y, F32, &format!("{name} weights expanded"));
        }
    });
}

/// On a device that leaves gaps between rows these start at 16 bytes nevertheless; in one long row
/// they do not.
fn rows_of_odd_length_start_anywhere() {
    every_pair(|name, device, pair| {
        // Planes that split K, and where both are of one dtype one plane.
        let step = if pair.0 == pair.1 { 3 } else { 6 };
        for &k in some(name, &[129, 5, 127, 3, 1, 1001], step) {
            for &m in some(name, &[4, 1, 40, 16], 2) {
                let whole = Product::exact([m, 24, k], pair, k as u64);
                let flat = |input: &Input| {
                    let count = input.values.len();
                    let row = Input::new([1, count], input.dtype, &input.values).on(device);
                    row.reshape(input.shape)
                };
                let y = product(flat(&whole.x), flat(&whole.weights), options(F32));
                whole.check_exact(&y, F32, &format!("{name} {k} columns"));
            }
        }
    });
}

catalogue![
    both_operands_may_be_any_view,
    x_may_have_any_number_of_dimensions,
    rows_may_be_one_row_again_and_again,
    rows_of_odd_length_start_anywhere,
];
