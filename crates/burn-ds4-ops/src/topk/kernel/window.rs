use cubecl::prelude::*;

use super::key::{NONE, key_of};

/// How many columns the tokens of a sequence see by the sequence's number: each one more than the one before, of so many to a column.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Tokens {
    /// Rows of a sequence.
    pub next_n: u32,
    /// Of these, those that the sequence's number counts already.
    pub counted: u32,
    /// Tokens to a column.
    pub ratio: u32,
    /// The largest number that makes a difference.
    pub most: u32,
}

/// The columns of a row that take part.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Window {
    pub start: u32,
    pub end: u32,
}

#[cube]
impl Window {
    /// The window of a row of `columns`; see [`Windows`](crate::topk::Windows).
    ///
    /// Without `starts`, `ends` are the numbers of sequences that `tokens` are of.
    pub fn of<I: Int>(
        starts: ComptimeOption<&[I]>,
        ends: ComptimeOption<&[I]>,
        row: u32,
        columns: u32,
        tokens: &Tokens,
    ) -> Window {
        #[comptime]
        if let ComptimeOption::Some(starts) = starts {
            let start = Window::bound::<I>(starts[row as usize], columns);
            #[comptime]
            if let ComptimeOption::Some(ends) = ends {
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
            if let ComptimeOption::Some(numbers) = ends {
                // Clamped first, so that the sum cannot overflow.
                let number =
                    Window::bound::<I>(numbers[(row / tokens.next_n) as usize], tokens.most);
                let seen = number + row % tokens.next_n + 1;
                let seen = select(seen > tokens.counted, seen - tokens.counted, 0u32);
                let end = seen / tokens.ratio;
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

    /// A bound clamped to `0..=most`, which the integer can hold.
    pub fn bound<I: Int>(value: I, most: u32) -> u32 {
        u32::cast_from(clamp(value, I::from_int(0), I::cast_from(most)))
    }

    pub fn length(&self) -> u32 {
        self.end - self.start
    }

    /// The key of what is at a column, if that takes part.
    pub fn key<F: Float>(&self, value: F, column: u32) -> u32 {
        select(self.holds(column), key_of(f32::cast_from(value)), NONE)
    }

    /// Which of the columns `first..first + count` take part: the first in the lowest bit, of 32 at most.
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
    // A shift by 32 has no meaning.
    select(bit < 32, (1u32 << (bit & 31)) - 1, u32::MAX)
}
