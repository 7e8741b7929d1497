//! Compressed rows in pages have the bits that they have one after the other.

use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_ds4_ops::attention::{
    CompressorState, PagedRows, RowRounding, VisibleBlocks, WindowLayout, compress_rows,
    index_scores, store_step,
};

use super::caching::{PLAIN, PROMPT, STARTS, Text};
use super::common::{assert_refused, devices, every_dtype, floats, integers, noise, read, some};
use super::compressing::{Case, Sizes};
use super::storing::{Dtypes, Layer, WINDOW, expect_equal};

const FITS: &str = "arguments that fit";
/// What pages hold that are nobody's, and rows beyond those of a sequence.
const NOBODYS: f32 = 3.0;

/// Rows in pages of so many, in an order of their own.
pub fn in_pages(rows: Tensor<3>, of_page: usize) -> PagedRows {
    let [batch, count, _] = rows.dims();
    let book = Book {
        batch,
        rows: count,
        of_page,
    };
    book.divide(rows)
}

/// Pages of sequences: the first is nobody's.
struct Book {
    batch: usize,
    rows: usize,
    of_page: usize,
}

impl Book {
    fn of_sequence(&self) -> usize {
        self.rows.div_ceil(self.of_page)
    }

    /// Page number `page` of a sequence: the sequences take turns, from the last page on.
    fn page(&self, sequence: usize, page: usize) -> i64 {
        let all = self.batch * self.of_sequence();
        (all - page * self.batch - sequence) as i64
    }

    fn table(&self, device: &Device) -> Tensor<2, Int> {
        let own = self.of_sequence();
        let pages = (0..self.batch).flat_map(|of| (0..own).map(move |page| self.page(of, page)));
        let pages: Vec<i64> = pages.collect();
        integers(&pages, [self.batch, own], device)
    }

    /// Rows `[batch, rows, width]` in pages.
    fn divide(&self, rows: Tensor<3>) -> PagedRows {
        let [batch, count, width] = rows.dims();
        let (own, device) = (self.of_sequence(), rows.device());
        let nobodys = |shape: [usize; 3]| Tensor::full(shape, NOBODYS, (&device, rows.dtype()));
        let mut parts = vec![rows.clone()];
        match own * self.of_page - count {
            0 => {}
            more => parts.push(nobodys([batch, more, width])),
        }
        let pages = Tensor::cat(parts, 1).reshape([batch * own, self.of_page, width]);
        let mut order = vec![0; batch * own];
        for sequence in 0..batch {
            for page in 0..own {
                order[self.page(sequence, page) as usize - 1] = (sequence * own + page) as i64;
            }
        }
        let pages = pages.select(0, integers(&order, [batch * own], &device));
        PagedRows {
            rows: Tensor::cat(vec![nobodys([1, self.of_page, width]), pages], 0),
            pages: Some(self.table(&device)),
        }
    }

    /// The rows of sequences in pages, one after the other.
    fn gather(&self, pages: Tensor<3>) -> Tensor<3> {
        let (own, [_, of_page, width]) = (self.of_sequence(), pages.dims());
        let table = self.table(&pages.device()).reshape([self.batch * own]);
        let rows = pages.select(0, table);
        let rows = rows.reshape([self.batch, own * of_page, width]);
        rows.narrow(1, 0, self.rows)
    }
}

/// Few queries over all rows and over picks, without and with tensor cores, and many.
const TEXTS: [Text; 5] = [
    Text {
        width: 128,
        rotated: 64,
        span: 20,
        slots: 24,
        ratio: 1,
        rows: 150,
        picks: Some(70),
        ..PLAIN
    },
    PLAIN,
    Text {
        heads: 64,
        width: 512,
        rotated: 64,
        picks: Some(6),
        ..PLAIN
    },
    Text {
        ratio: 1,
        rows: 150,
        ..PROMPT
    },
    Text {
        layout: WindowLayout::Latest,
        picks: Some(20),
        ..PROMPT
    },
];

fn attention_has_the_bits_of_rows_in_their_order() {
    every_dtype(|name, device, dtype| {
        for text in some(name, &TEXTS, 2) {
            let starts = [STARTS[5], 4, -1, 17];
            let batch = starts.len();
            let shape = [batch, text.count, text.heads, text.width];
            let x = floats(&text.queries(batch), shape, device).cast(dtype);
            let shape = [batch, text.rows, text.width];
            let rows = floats(&text.compressed(batch), shape, device).cast(dtype);
            let picks = text.picks.map(|picks| {
                let shape = [batch, text.count, picks];
                integers(&text.picked(batch), shape, device)
            });
            for of_page in [2, 16] {
                // Products that stand in where there is no kernel add up in an order that depends
                // on the number of rows, visible or not.
                let more = text.rows.next_multiple_of(of_page) - text.rows;
                let beyond = [batch, more, text.width];
                let beyond = Tensor::full(beyond, NOBODYS, (device, rows.dtype()));
                let rows = match more {
                    0 => rows.clone(),
                    _ => Tensor::cat(vec![rows.clone(), beyond], 1),
                };
                let expected = text.attend_to(&starts, x.clone(), rows.clone(), picks.clone());
                let paged = in_pages(rows, of_page);
                let actual = text.attend_to(&starts, x.clone(), paged, picks.clone());
                let what = format!("{name} {dtype:?} {text:?} in pages of {of_page}");
                assert!(read(&actual) == read(&expected), "{what}");
            }
        }
    });
}

fn scores_are_those_of_rows_in_their_order() {
    let (heads, width, rows, ratio) = (5, 64, 150, 4);
    let starts = [599, 0, -1, 200];
    let batch = starts.len();
    every_dtype(|name, device, dtype| {
        for (count, of_page) in [(1, 16), (3, 64), (20, 6)] {
            let draw = |shape: [usize; 4], seed| {
                floats(&noise(shape.iter().product(), seed), shape, device).cast(dtype)
            };
            let queries = draw([batch, count, heads, width], 1);
            let keys = draw([batch, 1, rows, width], 2).squeeze_dim::<3>(1);
            let weights = noise(batch * count * heads, 3);
            let weights = floats(&weights, [batch, count, heads], device);
            let score = |keys: PagedRows| {
                let visible = VisibleBlocks {
                    start: integers(&starts, [batch], device),
                    ratio,
                };
                let (queries, weights) = (queries.clone(), weights.clone());
                let scores = index_scores(queries, keys, weights, 0.3, Some(visible), None);
                read(&scores.expect(FITS).narrow(2, 0, rows))
            };
            let what = format!("{name} {dtype:?}: {count} queries, pages of {of_page}");
            let paged = score(in_pages(keys.clone(), of_page));
            assert!(paged == score(keys.into()), "{what}");
        }
    });
}

/// Blocks that overlap, and others; sequences that are not there.
fn rows_are_stored_in_pages() {
    let sizes = Sizes {
        batch: 3,
        ratio: 4,
        overlap: true,
        width: 24,
        rotated: 8,
        slots: 9,
        positions: 90,
    };
    let plain = Sizes {
        ratio: 3,
        overlap: false,
        ..sizes
    };
    every_dtype(|name, device, dtype| {
        for sizes in [sizes, plain] {
            let case = Case::new(sizes, 7);
            let book = Book {
                batch: 3,
                rows: sizes.rows(),
                of_page: 4,
            };
            let (raw, rows) = case.empty(dtype, device);
            let mut states = [
                CompressorState {
                    raw: raw.clone(),
                    rows: rows.clone(),
                },
                CompressorState {
                    raw,
                    rows: book.divide(rows).rows,
                },
            ];
            let mut starts = [0, -1, 5];
            for count in [50, 3, 1, 5, 20] {
                for (state, in_pages) in states.iter_mut().zip([false, true]) {
                    let inputs = case.inputs(&starts, count, device);
                    let positions = case.positions(&starts, device);
                    let options = sizes.options(RowRounding::Content);
                    let rows = PagedRows {
                        rows: state.rows.clone(),
                        pages: in_pages.then(|| book.table(device)),
                    };
                    let raw = state.raw.clone();
                    let stored = compress_rows(inputs, positions, options, raw, rows);
                    *state = stored.expect(FITS);
                }
                (starts[0], starts[2]) = (starts[0] + count as i64, starts[2] + count as i64);
                let what = format!("{name} {dtype:?} {sizes:?} up to {starts:?}");
                let [expected, paged] = &states;
                assert!(read(&paged.raw) == read(&expected.raw), "{what}: raw rows");
                let rows = book.gather(paged.rows.clone());
                assert!(read(&rows) == read(&expected.rows), "{what}: rows");
                let nobodys = read(&paged.rows.clone().narrow(0, 0, 1));
                assert!(nobodys.iter().all(|value| *value == NOBODYS), "{what}");
            }
        }
    });
}

fn a_step_stores_both_kinds_of_rows_in_the_same_pages() {
    let layer = Layer {
        compressed: Some((4, true)),
        indexed: Some(8),
        count: 5,
        ..WINDOW
    };
    let starts = [0, 3, -1, 10];
    let book = Book {
        batch: starts.len(),
        rows: 6,
        of_page: 2,
    };
    for (name, device) in devices() {
        let state = (Dtypes::all(FloatDType::F32), device);
        let (step, positions) = layer.step(&starts, state);
        let expected = store_step(step, positions).expect(FITS);
        let (mut step, positions) = layer.step(&starts, state);
        step.pages = Some(book.table(device));
        for part in [&mut step.compressed, &mut step.indexed] {
            let state = &mut part.as_mut().expect("a compressor").state;
            state.rows = book.divide(state.rows.clone()).rows;
        }
        let mut stored = store_step(step, positions).expect(FITS);
        for part in [&mut stored.compressed, &mut stored.indexed] {
            let state = part.as_mut().expect("a compressor");
            state.rows = book.gather(state.rows.clone());
        }
        expect_equal(&stored, &expected, name);
    }
}

fn pages_that_do_not_fit_are_refused() {
    for (name, device) in devices() {
        let score = |pages: &[i64], shape: [usize; 2], all: usize| {
            let rows = Tensor::zeros([all, 2, 4], device);
            let keys = PagedRows {
                rows,
                pages: Some(integers(pages, shape, device)),
            };
            let queries = Tensor::zeros([2, 1, 1, 4], device);
            let weights = Tensor::zeros([2, 1, 1], device);
            index_scores(queries, keys, weights, 1.0, None, None)
        };
        assert_eq!(score(&[0, 1], [2, 1], 2).expect(FITS).dims(), [2, 1, 2]);
        let message = "`pages` has shape [1, 2], expected [2, 2]";
        assert_refused(score(&[0, 1], [1, 2], 2), message);
        let message = "`pages of a sequence` is 0, expected at least 1";
        assert_refused(score(&[], [2, 0], 2), message);
        if name == "flex" {
            let message = "`last page` is 2, expected less than 2, the pages that there are";
            assert_refused(score(&[0, 2], [2, 1], 2), message);
            let message = message.replacen("is 2", &format!("is {}", usize::MAX), 1);
            assert_refused(score(&[0, -1], [2, 1], 2), &message);
        }
    }
}

catalogue![
    a_step_stores_both_kinds_of_rows_in_the_same_pages,
    attention_has_the_bits_of_rows_in_their_order,
    pages_that_do_not_fit_are_refused,
    rows_are_stored_in_pages,
    scores_are_those_of_rows_in_their_order,
];
