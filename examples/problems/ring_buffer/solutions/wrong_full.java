class RingBuffer {
    private final int[] values;
    private int first = 0, size = 0;

    RingBuffer(int capacity) {
        values = new int[capacity];
    }

    int size() {
        return size;
    }

    void add(int value) {
        // A full buffer loses its last value, in place of the first.
        if (size == values.length) size--;
        values[(first + size) % values.length] = value;
        size++;
    }

    int remove() {
        int value = values[first];
        first = (first + 1) % values.length;
        size--;
        return value;
    }
}
