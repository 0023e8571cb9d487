// The best tree of a draft's candidates: see kernels/tree/reference.py, which gives the same rows.
#include "native.h"

#include <math.h>
#include <string.h>

enum { MAX_COLUMNS = 64 };  // candidates and chains of a depth

typedef struct {
  int token, parent, depth, column;
  float weight;
  uint32_t chains;           // those that begin with the path to this row
  float score[MAX_COLUMNS];  // of the children that are not in the tree yet; -inf: no such child
  int best;                  // column of the best of them; -1: none
} Node;

typedef struct { Node rows[MAX_ROWS]; int count; } Growing;

static int64_t token_at(const Proposal *p, int depth, int column) {
  return column < p->width ? p->ids[depth * p->width + column] : p->chains[(column - p->width) * p->depths + depth];
}

static float corrected(const Proposal *p, int depth, float score) {
  if (!p->edges) return score;
  int claim = 0;
  while (claim < p->edge_count && p->edges[claim] < score) claim++;
  score += p->table[p->depth_bins[depth] * (p->edge_count + 1) + claim];
  return score > 0 ? 0 : score;
}

static void find_best(const Proposal *p, Node *node) {
  node->best = -1;
  for (int i = 0; i < p->width + p->chain_count; i++)
    if (node->score[i] > (node->best < 0 ? -INFINITY : node->score[node->best])) node->best = i;
}

// Scores the children of a row: one column for a token, a candidate's or that of the first chain that has it.
static void expand(const Proposal *p, Node *node) {
  int depth = node->depth, columns = p->width + p->chain_count, line = node->column < p->lines ? node->column : p->lines - 1;
  node->best = -1;
  if (depth == p->depths) return;
  for (int i = 0; i < columns; i++)
    node->score[i] = i < p->width ? corrected(p, depth, p->scores[((size_t)depth * p->lines + line) * p->width + i]) : -INFINITY;
  for (int chain = 0; chain < p->chain_count; chain++) {
    int64_t token = p->chains[chain * p->depths + depth];
    if (token < 0 || !(node->chains >> chain & 1)) continue;
    int home = 0;
    while (token_at(p, depth, home) != token) home++;
    float score = p->chain_scores[chain * p->depths + depth];
    if (score > node->score[home]) node->score[home] = score;
  }
  for (int i = 0; i < columns; i++)
    if (node->score[i] > 0) node->score[i] = 0;
  find_best(p, node);
}

static Node child_of(const Proposal *p, const Node *node, int parent, int column) {
  Node child = {.parent = parent, .depth = node->depth + 1, .column = column, .weight = node->weight + node->score[column]};
  child.token = (int)token_at(p, node->depth, column);
  for (int chain = 0; chain < p->chain_count; chain++)
    if (node->chains >> chain & 1 && p->chains[chain * p->depths + node->depth] == child.token) child.chains |= 1u << chain;
  return child;
}

// How many rows of the path of best children have at least the weight `spine`.
static int spine_rows(const Proposal *p, const Node *root) {
  Node tail = *root;
  int count = 0;
  while (count < p->nodes && tail.best >= 0) {
    float weight = tail.weight + tail.score[tail.best];
    if (weight < p->spine || weight == -INFINITY) break;
    tail = child_of(p, &tail, -1, tail.best);
    expand(p, &tail);
    count++;
  }
  return count;
}

// The row whose best child comes next: the heaviest; of equal ones the shallower, then the earlier parent.
static int next_parent(const Growing *g) {
  int best = -1;
  float most = 0;
  for (int r = 0; r < g->count; r++) {
    const Node *node = &g->rows[r];
    if (node->best < 0) continue;
    float weight = node->weight + node->score[node->best];
    if (best < 0 || weight > most || (weight == most && node->depth < g->rows[best].depth)) best = r, most = weight;
  }
  return best;
}

// Writes packed [4, rows] (tokens, parents, ancestor bits, depths) and weights [rows]; returns 0 if it is too large.
int tf_best_tree(const Proposal *p, int64_t *packed, float *weights) {
  if (p->nodes < 0 || p->nodes >= MAX_ROWS || p->rows <= p->nodes || p->rows > MAX_ROWS) return 0;
  if (p->width + p->chain_count > MAX_COLUMNS || p->chain_count > 32 || p->width < 1 || p->lines < 1) return 0;
  Growing g = {.count = 1};
  g.rows[0] = (Node){.token = (int)p->anchor, .parent = -1, .chains = (uint32_t)((1ull << p->chain_count) - 1)};
  expand(p, &g.rows[0]);
  int forced = spine_rows(p, &g.rows[0]), end = 0;  // the row in which the path of best children ends so far
  while (g.count <= p->nodes) {
    int parent = forced > 0 && p->nodes - (g.count - 1) == forced ? end : next_parent(&g);
    if (parent < 0) break;
    Node *node = &g.rows[parent];
    g.rows[g.count] = child_of(p, node, parent, node->best);
    node->score[node->best] = -INFINITY;
    find_best(p, node);
    expand(p, &g.rows[g.count]);
    if (parent == end && forced > 0) forced--, end = g.count;
    g.count++;
  }
  int rows = p->rows;
  for (int r = 0; r < rows; r++) {
    int inside = r < g.count;
    const Node *node = &g.rows[inside ? r : 0];
    packed[r] = node->token;
    packed[rows + r] = inside ? node->parent : -1;
    packed[2 * rows + r] = (int64_t)((inside && r ? (uint64_t)packed[2 * rows + node->parent] : 0) | 1ull << r);
    packed[3 * rows + r] = inside ? node->depth : 0;
    weights[r] = inside ? node->weight : -INFINITY;
  }
  return 1;
}
