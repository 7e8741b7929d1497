use cubecl::prelude::*;

use super::row::TopkIds;
use crate::select::{CubeUnits, Scanner};

/// The offset of a word in shared memory, padded so that lanes that read neighbouring runs of a
/// power of two of words rarely have bank conflicts.
#[cube]
fn padded(index: u32) -> usize {
    (index + (index >> 5)) as usize
}

/// Words of shared memory that `words` words take with their padding.
fn padded_length(words: u32) -> usize {
    (words + words / 32) as usize
}

/// A bitmap of columns, which brings chosen columns into ascending order. It has at least one word
/// for each unit.
#[derive(CubeType)]
pub(super) struct ColumnBitmap {
    words: Shared<[Atomic<u32>]>,
    #[cube(comptime)]
    count: u32,
    #[cube(comptime)]
    units: CubeUnits,
}

#[cube]
impl ColumnBitmap {
    /// Creates an empty bitmap. The cube must synchronise before the first column is marked.
    pub fn new(#[comptime] words: u32, #[comptime] units: CubeUnits) -> ColumnBitmap {
        let bitmap = ColumnBitmap {
            words: Shared::new_slice(comptime!(padded_length(words))),
            count: words,
            units,
        };
        let own = comptime!(words / units.cube);
        #[unroll]
        for i in 0..own {
            bitmap.words[padded(UNIT_POS * own + i)].store(0u32);
        }
        bitmap
    }

    /// Marks a column if it is among those that the bitmap shows, which begin with `first`.
    pub fn mark(&mut self, column: u32, first: u32) {
        // The subtraction wraps to a very large number for columns before `first`.
        let word = (column - first) / 32;
        if column >= first && word < self.count {
            self.words[padded(word)].fetch_or(1u32 << (column % 32));
        }
    }

    /// Writes the marked columns, of those that begin with `first`, and unmarks them. Returns their
    /// number. Every unit of the cube must call this.
    pub fn write(
        &mut self,
        scanner: &mut Scanner,
        first: u32,
        output: &mut TopkIds,
        out: usize,
    ) -> u32 {
        let own = comptime!(self.count / self.units.cube);
        sync_cube();
        let mut words = Array::<u32>::new(comptime!(own as usize));
        let mut count = 0u32;
        #[unroll]
        for i in 0..own {
            let index = padded(UNIT_POS * own + i);
            let word = self.words[index].load();
            self.words[index].store(0u32);
            words[i as usize] = word;
            count += word.count_ones();
        }
        let scan = scanner.scan(count);
        let mut at = out + scan.before as usize;
        #[unroll]
        for i in 0..own {
            let mut word = words[i as usize];
            while word != 0 {
                let column = first + (UNIT_POS * own + i) * 32 + word.trailing_zeros();
                output.ids[at] = column as i32;
                at += 1;
                word &= word - 1;
            }
        }
        scan.total
    }
}
