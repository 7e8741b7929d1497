//! Matches rows to clusters of limited capacity, where both sides have preferences.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// The preferred clusters of some rows.
pub(super) struct Preferences {
    pub(super) rows: Vec<u32>,
    /// `[rows, per_row]`: no cluster twice for a row, best first.
    pub(super) clusters: Vec<u32>,
    /// Like `clusters`, descending; no NaN.
    pub(super) similarities: Vec<f32>,
    pub(super) per_row: usize,
}

/// A row in a cluster. The order is the one in which a cluster rejects rows: the greatest is
/// rejected first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Match {
    pub(super) row: u32,
    pub(super) cluster: u32,
    pub(super) similarity: f32,
    /// The index in the list of rows.
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

/// Matches rows and clusters by deferred acceptance. Each row asks the best cluster that has not
/// rejected it yet. Each cluster keeps the most similar of the rows that ask, up to its capacity;
/// of equally similar rows, the smaller. Returns the matches, and the rows that all their preferred
/// clusters rejected.
///
/// The matching is stable: there is no row with a preferred cluster such that both would rather
/// have each other than what they get. Among all stable matchings, this one is best for every row,
/// whatever the order in which rows ask.
pub(super) fn match_rows(
    preferences: &Preferences,
    capacities: &[usize],
) -> (Vec<Match>, Vec<u32>) {
    let mut accepted: Vec<BinaryHeap<Match>> =
        capacities.iter().map(|_| BinaryHeap::new()).collect();
    let mut next = vec![0; preferences.rows.len()];
    let mut rejected = Vec::new();
    for index in 0..preferences.rows.len() {
        let mut unmatched = Some(index);
        while let Some(index) = unmatched {
            if next[index] == preferences.per_row {
                rejected.push(preferences.rows[index]);
                break;
            }
            let preference = index * preferences.per_row + next[index];
            next[index] += 1;
            let cluster = preferences.clusters[preference];
            let accepted = &mut accepted[cluster as usize];
            accepted.push(Match {
                row: preferences.rows[index],
                cluster,
                similarity: preferences.similarities[preference],
                index,
            });
            unmatched = None;
            if accepted.len() > capacities[cluster as usize] {
                unmatched = accepted.pop().map(|rejected_row| rejected_row.index);
            }
        }
    }
    rejected.sort_unstable();
    let accepted = accepted.into_iter().flat_map(BinaryHeap::into_vec);
    (accepted.collect(), rejected)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All rows have preferences for all clusters. Similarities are small integers, so that there
    /// are ties.
    fn drawn(rows: usize, clusters: usize, seed: u32) -> (Preferences, Vec<Vec<f32>>) {
        let mut state = seed;
        let mut draw = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as f32 % 7.0
        };
        let table: Vec<Vec<f32>> = (0..rows)
            .map(|_| (0..clusters).map(|_| draw()).collect())
            .collect();
        let mut preferences = Preferences {
            rows: (0..rows as u32).collect(),
            clusters: Vec::new(),
            similarities: Vec::new(),
            per_row: clusters,
        };
        for row in &table {
            let mut order: Vec<usize> = (0..clusters).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
            preferences.clusters.extend(order.iter().map(|&c| c as u32));
            preferences
                .similarities
                .extend(order.iter().map(|&c| row[c]));
        }
        (preferences, table)
    }

    fn clusters_of(matches: &[Match], rows: usize) -> Vec<Option<usize>> {
        let mut of = vec![None; rows];
        for found in matches {
            assert_eq!(of[found.row as usize], None, "a row is matched once");
            of[found.row as usize] = Some(found.cluster as usize);
        }
        of
    }

    #[test]
    fn no_row_and_cluster_would_rather_have_each_other() {
        for seed in 0..50 {
            let (rows, clusters) = (12, 4);
            let (preferences, table) = drawn(rows, clusters, seed);
            let (matches, rejected) = match_rows(&preferences, &[3; 4]);
            assert!(rejected.is_empty(), "the clusters have capacity for all");
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
        let preferences = Preferences {
            rows: vec![4, 7, 9, 2],
            clusters: vec![0; 4],
            similarities: vec![0.5, 0.9, 0.5, 0.5],
            per_row: 1,
        };
        let (matches, rejected) = match_rows(&preferences, &[2]);
        let mut rows: Vec<u32> = matches.iter().map(|found| found.row).collect();
        rows.sort_unstable();
        assert_eq!(rows, [2, 7]);
        assert_eq!(rejected, [4, 9]);
    }

    #[test]
    fn a_cluster_without_capacity_rejects_every_row() {
        let preferences = Preferences {
            rows: vec![0, 1],
            clusters: vec![1, 0, 1, 0],
            similarities: vec![1.0, 0.5, 0.5, 0.25],
            per_row: 2,
        };
        let (matches, rejected) = match_rows(&preferences, &[1, 0]);
        assert_eq!(matches.len(), 1);
        assert_eq!((matches[0].row, matches[0].cluster), (0, 0));
        assert_eq!(rejected, [1]);
    }
}
