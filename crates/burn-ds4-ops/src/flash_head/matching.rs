//! Who goes where, if both sides have preferences and one has little room.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// The clusters that rows want to be in.
pub(super) struct Wishes {
    pub(super) rows: Vec<u32>,
    /// `[rows, each]`: no cluster twice for a row, best first.
    pub(super) clusters: Vec<u32>,
    /// Like `clusters`, descending; no NaN.
    pub(super) similarities: Vec<f32>,
    pub(super) each: usize,
}

/// A row in a cluster. The order is that in which a cluster turns rows away: the greatest goes first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Match {
    pub(super) row: u32,
    pub(super) cluster: u32,
    pub(super) similarity: f32,
    /// In the list of rows.
    index: usize,
}

impl Ord for Match {
    fn cmp(&self, other: &Self) -> Ordering {
        let similarity = other.similarity.total_cmp(&self.similarity);
        similarity.then(self.row.cmp(&other.row))
    }
}

impl PartialOrd for Match {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Match {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Match {}

/// Deferred acceptance: each row asks the best cluster that has not turned it down, and each cluster keeps the most similar of those who
/// ask, of equal ones the smaller, as many as it has room for. Gives the rows that are kept, and those that all their wishes turned down.
///
/// No row and cluster, one a wish of the other, would both rather have each other than what they get; among all such matchings, this one
/// is best for every row, whatever the order in which rows ask.
pub(super) fn accept(wishes: &Wishes, room: &[usize]) -> (Vec<Match>, Vec<u32>) {
    let mut kept: Vec<BinaryHeap<Match>> = room.iter().map(|_| BinaryHeap::new()).collect();
    let mut next = vec![0; wishes.rows.len()];
    let mut turned_away = Vec::new();
    for index in 0..wishes.rows.len() {
        let mut asking = Some(index);
        while let Some(index) = asking {
            if next[index] == wishes.each {
                turned_away.push(wishes.rows[index]);
                break;
            }
            let wish = index * wishes.each + next[index];
            next[index] += 1;
            let cluster = wishes.clusters[wish];
            let kept = &mut kept[cluster as usize];
            kept.push(Match {
                row: wishes.rows[index],
                cluster,
                similarity: wishes.similarities[wish],
                index,
            });
            asking = None;
            if kept.len() > room[cluster as usize] {
                asking = kept.pop().map(|refused| refused.index);
            }
        }
    }
    turned_away.sort_unstable();
    let kept = kept.into_iter().flat_map(BinaryHeap::into_vec);
    (kept.collect(), turned_away)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All rows want all clusters; similarities are small integers, so that there are ties.
    fn drawn(rows: usize, clusters: usize, seed: u32) -> (Wishes, Vec<Vec<f32>>) {
        let mut state = seed;
        let mut draw = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as f32 % 7.0
        };
        let table: Vec<Vec<f32>> = (0..rows)
            .map(|_| (0..clusters).map(|_| draw()).collect())
            .collect();
        let mut wishes = Wishes {
            rows: (0..rows as u32).collect(),
            clusters: Vec::new(),
            similarities: Vec::new(),
            each: clusters,
        };
        for row in &table {
            let mut order: Vec<usize> = (0..clusters).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
            wishes.clusters.extend(order.iter().map(|&c| c as u32));
            wishes.similarities.extend(order.iter().map(|&c| row[c]));
        }
        (wishes, table)
    }

    fn clusters_of(matches: &[Match], rows: usize) -> Vec<Option<usize>> {
        let mut of = vec![None; rows];
        for found in matches {
            assert_eq!(of[found.row as usize], None, "a row is kept once");
            of[found.row as usize] = Some(found.cluster as usize);
        }
        of
    }

    #[test]
    fn no_row_and_cluster_would_rather_have_each_other() {
        for seed in 0..50 {
            let (rows, clusters) = (12, 4);
            let (wishes, table) = drawn(rows, clusters, seed);
            let (matches, turned_away) = accept(&wishes, &[3; 4]);
            assert!(turned_away.is_empty(), "there is room for all");
            let of = clusters_of(&matches, rows);
            for row in 0..rows {
                let own = of[row].expect("a cluster");
                for cluster in 0..clusters {
                    let better =
                        (table[row][own].total_cmp(&table[row][cluster])).then(cluster.cmp(&own));
                    if better.is_ge() {
                        continue;
                    }
                    let would_take = (0..rows).any(|other| {
                        let worse = table[other][cluster].total_cmp(&table[row][cluster]);
                        of[other] == Some(cluster) && worse.then(row.cmp(&other)).is_lt()
                    });
                    assert!(!would_take, "seed {seed}: row {row} and cluster {cluster}");
                }
            }
        }
    }

    #[test]
    fn a_full_cluster_keeps_the_most_similar_rows_and_the_smaller_of_equal_ones() {
        let wishes = Wishes {
            rows: vec![4, 7, 9, 2],
            clusters: vec![0; 4],
            similarities: vec![0.5, 0.9, 0.5, 0.5],
            each: 1,
        };
        let (matches, turned_away) = accept(&wishes, &[2]);
        let mut rows: Vec<u32> = matches.iter().map(|found| found.row).collect();
        rows.sort_unstable();
        assert_eq!(rows, [2, 7]);
        assert_eq!(turned_away, [4, 9]);
    }

    #[test]
    fn a_cluster_without_room_turns_everyone_down() {
        let wishes = Wishes {
            rows: vec![0, 1],
            clusters: vec![1, 0, 1, 0],
            similarities: vec![1.0, 0.5, 0.5, 0.25],
            each: 2,
        };
        let (matches, turned_away) = accept(&wishes, &[1, 0]);
        assert_eq!(matches.len(), 1);
        assert_eq!((matches[0].row, matches[0].cluster), (0, 0));
        assert_eq!(turned_away, [1]);
    }
}
