use cubecl::prelude::*;

use super::search::{Scanner, Units};

/// A word's place in shared memory, such that lanes that read neighbouring runs of a power of two of words rarely meet in a bank.
#[cube]
fn padded(index: u32) -> usize {
    (index + (index >> 5)) as usize
}

/// Words of shared memory for so many.
fn padded_length(words: u32) -> usize {
    (words + words / 32) as usize
}

/// A map of columns, to bring them into their order: of so many words, at least one to a unit.
#[derive(CubeType)]
pub(super) struct Map {
    words: Shared<[Atomic<u32>]>,
    #[cube(comptime)]
    count: u32,
    #[cube(comptime)]
    units: Units,
}

#[cube]
impl Map {
    /// All of the cube must wait for each other before the first column is marked.
    pub fn new(#[comptime] words: u32, #[comptime] units: Units) -> Map {
        let map = Map {
            words: Shared::new_slice(comptime!(padded_length(words))),
            count: words,
            units,
        };
        let own = comptime!(words / units.cube);
        #[unroll]
        for i in 0..own {
            map.words[padded(UNIT_POS * own + i)].store(0u32);
        }
        map
    }

    /// Marks a column if it is among those that begin with `first`.
    pub fn mark(&mut self, column: u32, first: u32) {
        // Columns before `first` become very large.
        let word = (column - first) / 32;
        if column >= first && word < self.count {
            self.words[padded(word)].fetch_or(1u32 << (column % 32));
        }
    }

    /// Writes the columns that are marked, of those that begin with `first`, and unmarks them. Returns how many there were. All of
    /// the cube must be here.
    pub fn write(&mut self, scanner: &mut Scanner, first: u32, ids: &mut [i32], out: usize) -> u32 {
        let own = comptime!(self.count / self.units.cube);
        sync_cube();
        let mut words = Array::<u32>::new(comptime!(own as usize));
        let mut count = 0u32;
        #[unroll]
        for i in 0..own {
            let place = padded(UNIT_POS * own + i);
            let word = self.words[place].load();
            self.words[place].store(0u32);
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
                ids[at] = column as i32;
                at += 1;
                word &= word - 1;
            }
        }
        scan.total
    }
}
