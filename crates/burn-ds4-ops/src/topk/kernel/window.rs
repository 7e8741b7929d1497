use cubecl::prelude::*;

use crate::comptime_option::ComptimeOption;
use crate::select::key::{NONE, key_of};

/// How the ends of the windows of a sequence's rows follow from its length: each row has one more
/// visible token than the one before, and a column stands for `ratio` tokens.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct CausalWindowArgs {
    /// Rows of a sequence.
    pub next_n: u32,
    /// How many of these rows the length already counts.
    pub counted: u32,
    /// Tokens that a column stands for.
    pub ratio: u32,
    /// The largest length that makes a difference.
    pub max_length: u32,
}

/// Where the windows of rows begin and end; see [`Windows`](crate::topk::Windows).
#[derive(CubeType, CubeLaunch)]
pub(crate) struct WindowArgs<I: Int> {
    pub starts: ComptimeOption<Box<[I]>>,
    /// Without `starts`, the lengths of sequences, from which `causal` computes the ends.
    pub ends: ComptimeOption<Box<[I]>>,
    pub causal: CausalWindowArgs,
}

/// The columns of a row that take part.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Window {
    pub start: u32,
    pub end: u32,
}

#[cube]
impl<I: Int> WindowArgs<I> {
    /// The window of a row of `columns`.
    pub(super) fn window(&self, row: u32, columns: u32) -> Window {
        let causal = &self.causal;
        #[comptime]
        if let ComptimeOption::Some(starts) = &self.starts {
            let start = Window::bound::<I>(starts[row as usize], columns);
            #[comptime]
            if let ComptimeOption::Some(ends) = &self.ends {
                let end = Window::bound::<I>(ends[row as usize], columns);
                Window {
                    start,
                    end: max(start, end),
                }
            } else {
                Window {
                    start,
                    end: columns,
                }
            }
        } else {
            #[comptime]
            if let ComptimeOption::Some(lengths) = &self.ends {
                // Clamped first, so that the sum cannot overflow.
                let length =
                    Window::bound::<I>(lengths[(row / causal.next_n) as usize], causal.max_length);
                let visible = length + row % causal.next_n + 1;
                let visible = select(visible > causal.counted, visible - causal.counted, 0u32);
                let end = visible / causal.ratio;
                Window {
                    start: 0u32.runtime(),
                    end: min(end, columns),
                }
            } else {
                Window {
                    start: 0u32.runtime(),
                    end: columns,
                }
            }
        }
    }
}

#[cube]
impl Window {
    /// Clamps a bound to `0..=most`, which the integer can hold.
    pub fn bound<I: Int>(value: I, most: u32) -> u32 {
        u32::cast_from(clamp(value, I::from_int(0), I::cast_from(most)))
    }

    pub fn length(&self) -> u32 {
        self.end - self.start
    }

    /// The key of the element at a column, or [`NONE`] if it does not take part.
    pub fn key<F: Float>(&self, value: F, column: u32) -> u32 {
        select(self.holds(column), key_of(f32::cast_from(value)), NONE)
    }

    /// Which of the columns `first..first + count` take part, the first in the lowest bit. `count`
    /// is 32 at most.
    pub fn mask(&self, first: u32, #[comptime] count: u32) -> u32 {
        let from = clamp(self.start, first, first + count) - first;
        let end = clamp(self.end, first, first + count) - first;
        bits_below(end) & !bits_below(from)
    }

    pub fn holds(&self, column: u32) -> bool {
        column >= self.start && column < self.end
    }
}

#[cube]
fn bits_below(bit: u32) -> u32 {
    // A shift by 32 is undefined.
    select(bit < 32, (1u32 << (bit & 31)) - 1, u32::MAX)
}
