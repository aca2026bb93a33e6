'use strict';
const root = document.documentElement;
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
root.classList.add('js');
const isDark = () => root.classList.contains('dark')
  || (!root.classList.contains('light') && matchMedia('(prefers-color-scheme: dark)').matches);
document.getElementById('theme').onclick = () => {
  const dark = isDark();
  root.classList.toggle('dark', !dark);
  root.classList.toggle('light', dark);
};
const setOpen = (value) => all('details').forEach((details) => { details.open = value; });
document.getElementById('open').onclick = () => setOpen(true);
document.getElementById('close').onclick = () => setOpen(false);
all('tr.more button').forEach((button) => {
  button.onclick = () => button.closest('tbody').classList.add('unfolded');
});
function filter() {
  const boxes = all('.filter input[value]');
  const kinds = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
  const everything = kinds.size === boxes.length;
  const quiet = document.getElementById('quiet').checked;
  all('section').forEach((section) => {
    const own = section.dataset.kinds.split(' ').filter(Boolean);
    const hidden = !everything && !own.some((kind) => kinds.has(kind));
    section.classList.toggle('hidden', hidden);
    const entry = document.querySelector(`nav li[data-for="${CSS.escape(section.id)}"]`);
    if (entry) entry.classList.toggle('hidden', hidden);
    all('[data-kind]', section).forEach((part) => {
      const kind = part.dataset.kind;
      part.classList.toggle('hidden', kind ? !kinds.has(kind) : !quiet && !part.querySelector('tr.piece'));
    });
  });
}
all('.filter input').forEach((box) => { box.onchange = filter; });
const wasOpen = new Map();
window.addEventListener('beforeprint', () => all('details').forEach((details) => {
  wasOpen.set(details, details.open);
  details.open = true;
}));
window.addEventListener('afterprint', () => wasOpen.forEach((value, details) => { details.open = value; }));
window.addEventListener('hashchange', openTarget);
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const details = target && target.querySelector('details');
  if (details) details.open = true;
}
openTarget();
